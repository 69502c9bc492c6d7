// Selection: one pass that adds the residual, selects numbers, and subtracts them from the residual.
#include "kernels.hpp"

#include <algorithm>
#include <functional>
#include <stdexcept>

namespace stretto {
namespace {

// ---- rules: selection, and the rest in the residual ---------------------------------------------------------------

struct Above {  // |a| >= tau, taken whole
    float tau;
    using Said = float;
    INLINE bool hit(float a, size_t) const { return std::fabs(a) >= tau; }
    INLINE float said(float a) const { return a; }
    INLINE float left(float) const { return 0.0f; }
};

struct Moved {  // |a_i| > scale |moved_i|, taken whole
    const float *moved;
    float scale;
    using Said = float;
    INLINE bool hit(float a, size_t i) const { return std::fabs(a) > std::fabs(moved[i]) * scale; }
    INLINE float said(float a) const { return a; }
    INLINE float left(float) const { return 0.0f; }
};

struct Step {  // |a| >= tau, +-tau is taken
    float tau;
    using Said = uint8_t;
    INLINE bool hit(float a, size_t) const { return std::fabs(a) >= tau; }
    INLINE uint8_t said(float a) const { return a < 0; }
    INLINE float left(float a) const { return a < 0 ? a + tau : a - tau; }
};

struct Candidates {  // keys of at least `least`; nothing is taken yet
    uint32_t least;
    using Said = float;
    INLINE bool hit(float a, size_t) const { return key_of(a) >= least; }
    INLINE float said(float a) const { return a; }
    INLINE float left(float a) const { return a; }
};

// ---- the pass ------------------------------------------------------------------------------------------------------

constexpr size_t NO_LIMIT = ~size_t{0};

template <class Rule> struct Found {
    Array<int32_t> indices;
    Array<typename Rule::Said> said;
    bool complete = true;
};

// Applies `rule` to one block from number i; `length` is BLOCK except at the end.
template <class Rule, bool RESIDUAL>
INLINE void block_of(const float *x, float *residual, size_t i, size_t length, const Rule &rule, Found<Rule> &found) {
    float a[BLOCK];
    uint32_t any = 0;
    for (size_t j = 0; j < length; ++j) {
        float sum = RESIDUAL ? residual[i + j] + x[i + j] : x[i + j];
        a[j] = sum;
        if (RESIDUAL) residual[i + j] = sum;
        any |= rule.hit(sum, i + j) ? 1u : 0u;
    }
    if (!any || !found.complete) return;
    uint8_t flags[BLOCK] = {};
    for (size_t j = 0; j < length; ++j) flags[j] = rule.hit(a[j], i + j) ? 1 : 0;
    uint64_t mask = mask_of(flags);
    int32_t *indices = found.indices.end_with_room(BLOCK);
    auto *said = found.said.end_with_room(BLOCK);
    size_t count = 0;
    for (; mask; mask &= mask - 1, ++count) {
        size_t j = size_t(lowest_bit(mask));
        indices[count] = int32_t(i + j);
        said[count] = rule.said(a[j]);
        if (RESIDUAL) residual[i + j] = rule.left(a[j]);
    }
    found.indices.grown(count);
    found.said.grown(count);
}

template <class Rule, bool RESIDUAL>
INLINE void pass(const float *x, float *residual, Range range, Rule rule, size_t limit, Found<Rule> &found) {
    size_t i = range.from;
    for (; i + BLOCK <= range.to; i += BLOCK) {
        block_of<Rule, RESIDUAL>(x, residual, i, BLOCK, rule, found);
        if (found.indices.size() > limit) found.complete = false;
    }
    if (i < range.to) block_of<Rule, RESIDUAL>(x, residual, i, range.to - i, rule, found);
    if (found.indices.size() > limit) found.complete = false;
}

#define PASS(Rule)                                                                                                     \
    EACH_CPU void pass_residual(const float *x, float *residual, Range range, Rule rule, size_t limit,                 \
        Found<Rule> &found) {                                                                                          \
        pass<Rule, true>(x, residual, range, rule, limit, found);                                                      \
    }                                                                                                                  \
    EACH_CPU void pass_plain(const float *x, Range range, Rule rule, size_t limit, Found<Rule> &found) {               \
        pass<Rule, false>(x, nullptr, range, rule, limit, found);                                                      \
    }

PASS(Above)
PASS(Moved)
PASS(Step)
PASS(Candidates)

template <class Rule>
void collect(const float *x, float *residual, Range range, const Rule &rule, size_t limit, Found<Rule> &found) {
    if (residual)
        pass_residual(x, residual, range, rule, limit, found);
    else
        pass_plain(x, range, rule, limit, found);
}

template <class T> Array<T> joined(std::vector<Array<T>> &pieces) {
    if (pieces.size() == 1) {
        pieces[0].fit();
        return std::move(pieces[0]);
    }
    size_t size = 0;
    for (auto &one : pieces) size += one.size();
    Array<T> whole(size);
    size_t at = 0;
    for (auto &one : pieces) {
        if (one.size()) std::memcpy(whole.data() + at, one.data(), one.size() * sizeof(T));
        at += one.size();
    }
    return whole;
}

template <class Rule>
Found<Rule> select(const float *x, float *residual, size_t n, Rule rule, size_t threads, size_t limit = NO_LIMIT) {
    auto ranges = parts(n, threads, BLOCK);
    std::vector<Found<Rule>> found(ranges.size());
    together(ranges.size(), [&](size_t part) { collect(x, residual, ranges[part], rule, limit, found[part]); });
    Found<Rule> whole;
    std::vector<Array<int32_t>> indices;
    std::vector<Array<typename Rule::Said>> said;
    for (auto &one : found) {
        whole.complete &= one.complete;
        indices.push_back(std::move(one.indices));
        said.push_back(std::move(one.said));
    }
    whole.indices = joined(indices);
    whole.said = joined(said);
    return whole;
}

// ---- the k largest -------------------------------------------------------------------------------------------------

// The k-th largest key, and the count of numbers with that key among the k largest.
struct Cut {
    uint32_t key;
    size_t equal;
};

Cut cut_of(std::vector<uint32_t> &keys, size_t k) {
    std::nth_element(keys.begin(), keys.begin() + ptrdiff_t(k - 1), keys.end(), std::greater<uint32_t>());
    uint32_t key = keys[k - 1];
    auto above = std::count_if(keys.begin(), keys.begin() + ptrdiff_t(k), [key](uint32_t one) { return one > key; });
    return {key, k - size_t(above)};
}

constexpr size_t RUN = 4;

size_t sampled(size_t n) { return std::min(size_t{1} << 16, n / 8 / RUN * RUN); }

// Estimates a key that slightly more than k numbers reach, from a sample of short runs.
uint32_t guess(const float *x, const float *residual, size_t n, size_t k) {
    std::vector<uint32_t> keys(sampled(n));
    uint32_t noise = 12345;
    size_t runs = keys.size() / RUN;
    for (size_t run = 0; run < runs; ++run) {
        noise = noise * 1664525u + 1013904223u;
        size_t begin = n * run / runs, end = n * (run + 1) / runs - RUN;
        size_t at = begin + size_t(uint64_t(noise) * (end - begin + 1) >> 32);
        for (size_t j = 0; j < RUN; ++j) keys[run * RUN + j] = key_of(residual ?
            residual[at + j] + x[at + j] : x[at + j]);
    }
    double expected = double(keys.size()) * double(k) / double(n);
    size_t rank = size_t(expected + 6 * std::sqrt(expected) + 10);
    if (rank >= keys.size()) return 0;
    std::nth_element(keys.begin(), keys.begin() + ptrdiff_t(rank), keys.end(), std::greater<uint32_t>());
    return keys[rank];
}

// Counts the values of `bits` bits of the key at `shift`, among numbers whose higher bits are `prefix`.
void count_keys(const float *a, size_t n, int shift, int bits, uint32_t prefix, std::vector<size_t> &counts) {
    uint32_t last = (1u << bits) - 1;
    std::vector<uint32_t> some(4u << bits);
    for (size_t i = 0; i < n; ++i) {
        uint32_t key = key_of(a[i]);
        if (uint64_t(key) >> (shift + bits) == prefix) ++some[(i & 3) << bits | (key >> shift & last)];
    }
    for (size_t i = 0; i < some.size(); ++i) counts[i & last] += some[i];
}

// Finds the cut in three passes over all of `a`, by 11 + 11 + 9 bits of the key, for any numbers.
Cut exact_cut(const float *a, size_t n, size_t k, size_t threads) {
    uint32_t prefix = 0;
    for (int shift : {20, 9, 0}) {
        int bits = shift ? 11 : 9;
        auto ranges = parts(n, threads, BLOCK);
        std::vector<std::vector<size_t>> counts(ranges.size(), std::vector<size_t>(size_t{1} << bits));
        together(ranges.size(), [&](size_t part) {
            count_keys(a + ranges[part].from, ranges[part].to - ranges[part].from, shift, bits, prefix, counts[part]);
        });
        uint32_t digit = 1u << bits;
        size_t here = 0;
        do {
            k -= here;
            --digit;
            here = 0;
            for (auto &one : counts) here += one[digit];
        } while (here < k);
        prefix = prefix << bits | digit;
    }
    return {prefix, k};
}

// Takes numbers above the cut, and the first of the equal ones. Writes k entries to `indices` and `values`.
template <class Place>
void take(const float *values_from, float *residual, size_t count, const Place &place, Cut cut, int32_t *indices,
          float *values) {
    size_t found = 0;
    for (size_t i = 0; i < count; ++i) {
        float a = values_from[i];
        uint32_t key = key_of(a);
        if (key < cut.key) continue;
        if (key == cut.key) {
            if (!cut.equal) continue;
            --cut.equal;
        }
        size_t at = place(i);
        indices[found] = int32_t(at);
        values[found++] = a;
        if (residual) residual[at] = 0.0f;
    }
}

Picks largest_by_counting(const float *a, float *residual, size_t n, size_t k, size_t threads) {
    Picks picks{Array<int32_t>(k), Array<float>(k)};
    Cut cut = exact_cut(a, n, k, threads);
    take(a, residual, n, [](size_t i) { return i; }, cut, picks.indices.data(), picks.values.data());
    return picks;
}

// ---- the k largest of a chunk, which stays in the cache ------------------------------------------------------------

constexpr size_t LITTLE = 512, BINS = 2048;

// Appends the keys of at least `least`.
EACH_CPU void keys_above(const float *a, size_t n, uint32_t least, std::vector<uint32_t> &keys) {
    for (size_t i = 0; i < n; i += BLOCK) {
        size_t length = n - i < BLOCK ? n - i : BLOCK;
        uint32_t most = 0;
        for (size_t j = 0; j < length; ++j) most = std::max(most, key_of(a[i + j]));
        if (most < least) continue;
        for (size_t j = 0; j < length; ++j)
            if (key_of(a[i + j]) >= least) keys.push_back(key_of(a[i + j]));
    }
}

Cut cut_of_chunk(const float *a, size_t n, size_t k, std::vector<uint32_t> &keys) {
    keys.clear();
    uint32_t least = 0;
    if (n > LITTLE) {
        uint32_t counts[BINS] = {};
        for (size_t i = 0; i < n; ++i) ++counts[key_of(a[i]) >> 20];
        size_t bin = BINS, above = 0;
        while (above < k) above += counts[--bin];
        least = uint32_t(bin) << 20;
    }
    keys_above(a, n, least, keys);
    return cut_of(keys, k);
}

// Writes the entries that reach the cut; see `take`.
EACH_CPU void take_of_chunk(const float *a, float *residual, size_t n, size_t first, Cut cut, int32_t *indices,
                            float *values) {
    for (size_t i = 0; i < n; i += BLOCK) {
        size_t length = n - i < BLOCK ? n - i : BLOCK;
        uint32_t most = 0;
        for (size_t j = 0; j < length; ++j) most = std::max(most, key_of(a[i + j]));
        if (most < cut.key) continue;
        for (size_t j = 0; j < length; ++j) {
            float one = a[i + j];
            uint32_t key = key_of(one);
            if (key < cut.key) continue;
            if (key == cut.key) {
                if (!cut.equal) continue;
                --cut.equal;
            }
            *indices++ = int32_t(first + i + j);
            *values++ = one;
            if (residual) residual[i + j] = 0.0f;
        }
    }
}

constexpr uint32_t EIGHTH = 1u << 20;  // an eighth of an octave, as a difference of keys

// Each chunk's guess is a little below the cut of the chunk before it; where that was too high, keys are counted.
void largest_of_chunks(const float *x, float *residual, Range range, size_t chunk, size_t k, int32_t *indices,
                       float *values) {
    std::vector<uint32_t> keys;
    Found<Candidates> found;
    uint32_t least = 0x80000000u;
    for (size_t from = range.from; from < range.to; from += chunk) {
        size_t length = std::min(chunk, range.to - from), wanted = std::min(k, length);
        found.indices.shorten(0), found.said.shorten(0), found.complete = true;
        collect(x, residual, {from, from + length}, Candidates{least}, 2 * k + length / 4, found);
        if (!wanted) continue;
        if (found.complete && found.indices.size() >= wanted) {
            keys.resize(found.said.size());
            for (size_t i = 0; i < keys.size(); ++i) keys[i] = key_of(found.said[i]);
            Cut cut = cut_of(keys, wanted);
            const int32_t *places = found.indices.data();
            take(found.said.data(), residual, keys.size(), [places](size_t i) { return size_t(places[i]); }, cut,
                indices,
                 values);
            least = cut.key > EIGHTH ? cut.key - EIGHTH : 1;
        } else {
            const float *a = residual ? residual + from : x + from;
            Cut cut = cut_of_chunk(a, length, wanted, keys);
            take_of_chunk(a, residual ? residual + from : nullptr, length, from, cut, indices, values);
            least = cut.key > EIGHTH ? cut.key - EIGHTH : 1;
        }
        indices += wanted;
        values += wanted;
    }
}

}  // namespace

Picks take_above(const float *x, float *residual, size_t n, float tau, size_t threads) {
    auto found = select(x, residual, n, Above{tau}, threads);
    return {std::move(found.indices), std::move(found.said)};
}

Picks take_moved(const float *x, float *residual, const float *moved, size_t n, float scale, size_t threads) {
    auto found = select(x, residual, n, Moved{moved, scale}, threads);
    return {std::move(found.indices), std::move(found.said)};
}

Steps take_threshold(const float *x, float *residual, size_t n, float tau, size_t threads) {
    auto found = select(x, residual, n, Step{tau}, threads);
    return {std::move(found.indices), std::move(found.said)};
}

// A guess from a sample, slightly too low; one pass that collects the numbers that reach it; the exact cut among these.
// If the guess is too high, or far too many numbers reach it (many equal ones), the cut is found by counting.
Picks take_largest(const float *x, float *residual, size_t n, size_t k, size_t threads) {
    k = std::min(k, n);
    bool guessed = n >= 8 * BLOCK && k <= n / 4 && k > 0;
    uint32_t least = guessed ? std::max(guess(x, residual, n, k), 1u) : 0x7fffffffu + 1u;
    size_t limit = guessed ? 2 * k + std::min(n / 4, size_t{1} << 16) : NO_LIMIT;
    auto found = select(x, residual, n, Candidates{least}, threads, limit);
    if (!k) return {Array<int32_t>(0), Array<float>(0)};
    if (!found.complete || found.indices.size() < k) return largest_by_counting(residual ? residual : x, residual, n,
        k, threads);
    std::vector<uint32_t> keys(found.said.size());
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = key_of(found.said[i]);
    Picks picks{Array<int32_t>(k), Array<float>(k)};
    const int32_t *indices = found.indices.data();
    take(found.said.data(), residual, keys.size(), [indices](size_t i) { return size_t(indices[i]); }, cut_of(keys, k),
         picks.indices.data(), picks.values.data());
    return picks;
}

Picks take_largest_per_chunk(const float *x, float *residual, size_t n, size_t chunk, size_t k, size_t threads) {
    size_t whole = n / chunk, each = std::min(k, chunk), last = std::min(k, n % chunk);
    Picks picks{Array<int32_t>(whole * each + last), Array<float>(whole * each + last)};
    auto ranges = parts(n, threads, chunk);
    together(ranges.size(), [&](size_t part) {
        size_t at = ranges[part].from / chunk * each;
        largest_of_chunks(x, residual, ranges[part], chunk, k, picks.indices.data() + at, picks.values.data() + at);
    });
    return picks;
}

void add_at(float *total, size_t n, const int32_t *indices, const float *values, size_t count) {
    uint32_t most = 0;
    for (size_t i = 0; i < count; ++i) most = std::max(most, uint32_t(indices[i]));
    if (count && most >= n) throw std::invalid_argument("an index lies outside the tensor that is added to");
    for (size_t i = 0; i < count; ++i) total[indices[i]] += values[i];
}

}  // namespace stretto
