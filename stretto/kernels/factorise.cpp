// Factors of a matrix: steps of stochastic gradient descent over its known values, and their squared errors.
#include "kernels.hpp"

namespace stretto {
namespace {

constexpr size_t LANES = 8, AHEAD = 6;  // numbers summed side by side; values ahead of which entries are loaded

INLINE void prefetch(const float *numbers, size_t count) {
#if defined(__GNUC__)
    for (size_t at = 0; at < count; at += 16) __builtin_prefetch(numbers + at, 1);
#endif
}

// The dot product in a fixed order: eight sums of every eighth product, added in halves.
template <size_t RANK> INLINE float dot(const float *a, const float *b, size_t rank) {
    const size_t count = RANK ? RANK : rank;
    float sums[LANES] = {0};
    for (size_t at = 0; at < count; at += LANES)
        for (size_t lane = 0; lane < LANES; ++lane) sums[lane] += a[at + lane] * b[at + lane];
    const float low[4] = {sums[0] + sums[4], sums[1] + sums[5], sums[2] + sums[6], sums[3] + sums[7]};
    return (low[0] + low[2]) + (low[1] + low[3]);
}

template <size_t RANK>
INLINE float predicted(const Factors &of, const Known &known, size_t at, float mean, float *row, float *column) {
    return ((mean + of.row_bias[known.row[at]]) + of.column_bias[known.column[at]]) + dot<RANK>(row, column, of.rank);
}

template <size_t RANK> INLINE void ahead(const Factors &of, const Known &known, size_t at) {
    const size_t rank = RANK ? RANK : of.rank;
    if (at + AHEAD >= known.count) return;
    prefetch(of.rows + size_t(known.row[at + AHEAD]) * rank, rank);
    prefetch(of.columns + size_t(known.column[at + AHEAD]) * rank, rank);
}

template <size_t RANK> INLINE void steps(const Factors &of, const Known &known, float mean, float lr, float l2) {
    const size_t rank = RANK ? RANK : of.rank;
    for (size_t at = 0; at < known.count; ++at) {
        ahead<RANK>(of, known, at);
        float *__restrict row = of.rows + size_t(known.row[at]) * rank;
        float *__restrict column = of.columns + size_t(known.column[at]) * rank;
        const float error = known.value[at] - predicted<RANK>(of, known, at, mean, row, column);
        float &row_bias = of.row_bias[known.row[at]], &column_bias = of.column_bias[known.column[at]];
        row_bias += lr * (error - l2 * row_bias);
        column_bias += lr * (error - l2 * column_bias);
        for (size_t i = 0; i < rank; ++i) {
            const float a = row[i], b = column[i];
            row[i] = a + lr * (error * b - l2 * a);
            column[i] = b + lr * (error * a - l2 * b);
        }
    }
}

template <size_t RANK> INLINE double errors(const Factors &of, const Known &known, float mean, float least, float most) {
    const size_t rank = RANK ? RANK : of.rank;
    double total = 0;
    for (size_t at = 0; at < known.count; ++at) {
        ahead<RANK>(of, known, at);
        float *row = of.rows + size_t(known.row[at]) * rank, *column = of.columns + size_t(known.column[at]) * rank;
        const float found = predicted<RANK>(of, known, at, mean, row, column);
        const double error = double(known.value[at]) - double(found < least ? least : found > most ? most : found);
        total += error * error;
    }
    return total;
}

using Three = const float (&)[3];
EACH_CPU void steps_of_32(const Factors &of, const Known &known, Three by) {
    steps<32>(of, known, by[0], by[1], by[2]);
}
EACH_CPU void steps_of_any(const Factors &of, const Known &known, Three by) {
    of.rank == 16 ? steps<16>(of, known, by[0], by[1], by[2])
                  : of.rank == 64 ? steps<64>(of, known, by[0], by[1], by[2])
                                  : steps<0>(of, known, by[0], by[1], by[2]);
}
EACH_CPU double errors_of_32(const Factors &of, const Known &known, Three by) {
    return errors<32>(of, known, by[0], by[1], by[2]);
}
EACH_CPU double errors_of_any(const Factors &of, const Known &known, Three by) {
    return errors<0>(of, known, by[0], by[1], by[2]);
}

}  // namespace

void factor_steps(const Factors &of, const Known &known, float mean, float lr, float l2) {
    (of.rank == 32 ? steps_of_32 : steps_of_any)(of, known, {mean, lr, l2});
}

double factor_errors(const Factors &of, const Known &known, float mean, float least, float most) {
    return (of.rank == 32 ? errors_of_32 : errors_of_any)(of, known, {mean, least, most});
}

}  // namespace stretto
