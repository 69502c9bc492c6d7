// Python bindings: check input tensors, release the interpreter's lock, return new tensors.
#include "shared_memory.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>

namespace nb = nanobind;
using namespace stretto;

namespace {

template <class T> using Flat = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T> using Given = nb::ndarray<nb::pytorch, T, nb::ndim<1>>;
using In = Flat<const float>;
using OptionalIn = std::optional<Flat<float>>;

template <class T> Given<T> give(Array<T> array) {
    size_t size = array.size();
    T *data = array.release();
    nb::capsule owner(data, [](void *memory) noexcept { std::free(memory); });
    return Given<T>(data, {size}, owner);
}

template <class A, class B> nb::tuple give(A first, B second) {
    return nb::make_tuple(give(std::move(first)), give(std::move(second)));
}

void require(bool holds, const char *what) {
    if (!holds) throw std::invalid_argument(what);
}

size_t length(const In &x) {
    require(x.size() < size_t{1} << 31, "a tensor has 2^31 numbers or more");
    return x.size();
}

float *fitting(const In &x, const OptionalIn &error) {
    if (!error) return nullptr;
    require(error->size() == x.size(), "the residual has another length");
    return error->data();
}

size_t positive(int64_t number, const char *what) {
    require(number >= 1, what);
    return size_t(number);
}

size_t not_negative(int64_t number, const char *what) {
    require(number >= 0, what);
    return size_t(number);
}

template <class Work> auto unlocked(const Work &work) {
    nb::gil_scoped_release release;
    return work();
}

size_t buckets(size_t n, size_t bucket) { return (n + bucket - 1) / bucket; }

int known(int levels) {
    require(levels == 127 || levels == 7 || levels == 1, "levels are 127, 7 or 1");
    return levels;
}

nb::tuple largest(In x, OptionalIn error, int64_t k, size_t threads) {
    size_t n = length(x), wanted = not_negative(k, "k is negative");
    float *residual = fitting(x, error);
    auto found = unlocked([&] { return take_largest(x.data(), residual, n, wanted, threads); });
    return give(std::move(found.indices), std::move(found.values));
}

nb::tuple largest_per_chunk(In x, OptionalIn error, int64_t chunk, int64_t k, size_t threads) {
    size_t n = length(x), wanted = not_negative(k, "k is negative"), size = positive(chunk, "a chunk holds nothing");
    float *residual = fitting(x, error);
    auto found = unlocked([&] { return take_largest_per_chunk(x.data(), residual, n, size, wanted, threads); });
    return give(std::move(found.indices), std::move(found.values));
}

nb::tuple above(In x, OptionalIn error, float tau, size_t threads) {
    size_t n = length(x);
    float *residual = fitting(x, error);
    auto found = unlocked([&] { return take_above(x.data(), residual, n, tau, threads); });
    return give(std::move(found.indices), std::move(found.values));
}

nb::tuple moved_further(In x, OptionalIn error, In moved, float scale, size_t threads) {
    size_t n = length(x);
    float *residual = fitting(x, error);
    require(moved.size() == n, "the move has another length");
    auto found = unlocked([&] { return take_moved(x.data(), residual, moved.data(), n, scale, threads); });
    return give(std::move(found.indices), std::move(found.values));
}

nb::tuple threshold(In x, OptionalIn error, float tau, size_t threads) {
    size_t n = length(x);
    float *residual = fitting(x, error);
    auto found = unlocked([&] { return take_threshold(x.data(), residual, n, tau, threads); });
    return give(std::move(found.indices), std::move(found.negative));
}

Given<uint8_t> pack(Flat<const int32_t> indices, int64_t n) {
    size_t places = not_negative(n, "n is negative");
    return give(unlocked([&] { return pack_indices(indices.data(), indices.size(), places); }));
}

nb::tuple unpack(Flat<const uint8_t> message, int64_t n) {
    size_t places = not_negative(n, "n is negative");
    require(places < size_t{1} << 31, "a tensor has 2^31 numbers or more");
    auto found = unlocked([&] { return unpack_indices(message.data(), message.size(), places); });
    return nb::make_tuple(give(std::move(found.first)), found.second);
}

void add_values(Flat<float> total, Flat<const int32_t> indices, In values) {
    require(indices.size() == values.size(), "there are not as many indices as values");
    unlocked([&] { add_at(total.data(), total.size(), indices.data(), values.data(), values.size()); });
}

nb::tuple signs(In x, OptionalIn error, int64_t bucket, bool two, size_t threads) {
    size_t n = length(x), size = positive(bucket, "a bucket holds nothing");
    float *residual = fitting(x, error);
    auto coded = unlocked([&] { return sign_pack(x.data(), residual, n, size, two, threads); });
    return give(std::move(coded.packed), std::move(coded.scales));
}

void add_signs(Flat<float> total, Flat<const uint8_t> packed, In scales, int64_t bucket, size_t threads) {
    size_t n = total.size(), size = positive(bucket, "a bucket holds nothing");
    require(packed.size() >= (n + 7) / 8 && scales.size() >= 2 * buckets(n, size), "signs or scales are missing");
    unlocked([&] { add_sign(total.data(), n, packed.data(), scales.data(), size, threads); });
}

nb::tuple levels_of(In x, OptionalIn error, int levels, int64_t bucket, bool l2, bool stochastic, uint32_t seed,
                    size_t threads) {
    size_t n = length(x), size = positive(bucket, "a bucket holds nothing");
    float *residual = fitting(x, error);
    known(levels);
    auto coded = unlocked(
        [&] { return quantise(x.data(), residual, n, levels, size, l2, stochastic, seed, threads); });
    return give(std::move(coded.packed), std::move(coded.scales));
}

void add_levels(Flat<float> total, Flat<const uint8_t> packed, In scales, int levels, int64_t bucket, size_t threads) {
    size_t n = total.size(), size = positive(bucket, "a bucket holds nothing");
    require(packed.size() >= packed_bytes(n, known(levels)) && scales.size() >= buckets(n, size),
            "codes or scales are missing");
    unlocked([&] { add_quantised(total.data(), n, packed.data(), scales.data(), levels, size, threads); });
}

using Numbers = Flat<const int32_t>;

struct Matrix {  // factors and values of a matrix, whose numbers of rows and of columns were checked
    Factors factors;
    Known known;
};

bool all_below(const Numbers &numbers, size_t limit) {
    uint32_t largest = 0;  // a negative number is a large one
    for (size_t i = 0; i < numbers.size(); ++i) {
        uint32_t number = uint32_t(numbers.data()[i]);
        largest = number > largest ? number : largest;
    }
    return !numbers.size() || largest < limit;
}

Matrix matrix(Flat<float> &rows, Flat<float> &row_bias, Flat<float> &columns, Flat<float> &column_bias, Numbers &row,
              Numbers &column, In &value) {
    size_t rank = row_bias.size() ? rows.size() / row_bias.size() : 8;
    require(rank % 8 == 0 && rank > 0, "the rank is no multiple of 8");
    require(rows.size() == rank * row_bias.size() && columns.size() == rank * column_bias.size(),
            "factors and biases have other numbers of rows or columns");
    require(row.size() == value.size() && column.size() == value.size(), "there are not as many places as values");
    require(all_below(row, row_bias.size()) && all_below(column, column_bias.size()), "a value is outside the matrix");
    return {{rows.data(), row_bias.data(), columns.data(), column_bias.data(), rank},
            {row.data(), column.data(), value.data(), value.size()}};
}

void steps(Flat<float> rows, Flat<float> row_bias, Flat<float> columns, Flat<float> column_bias, Numbers row,
           Numbers column, In value, float mean, float lr, float l2) {
    auto of = matrix(rows, row_bias, columns, column_bias, row, column, value);
    unlocked([&] { factor_steps(of.factors, of.known, mean, lr, l2); });
}

double errors(Flat<float> rows, Flat<float> row_bias, Flat<float> columns, Flat<float> column_bias, Numbers row,
              Numbers column, In value, float mean, float least, float most) {
    auto of = matrix(rows, row_bias, columns, column_bias, row, column, value);
    return unlocked([&] { return factor_errors(of.factors, of.known, mean, least, most); });
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "The kernels in C++; stretto.kernels.native says what each does.";
    auto x = [] { return nb::arg("x").noconvert(); };
    auto residual = [] { return nb::arg("residual").noconvert().none(); };
    m.attr("SOURCES") = STRETTO_SOURCES;
    m.def("take_largest", &largest, x(), residual(), nb::arg("k"), nb::arg("threads"));
    m.def("take_largest_per_chunk", &largest_per_chunk, x(), residual(), nb::arg("chunk"), nb::arg("k"),
          nb::arg("threads"));
    m.def("take_above", &above, x(), residual(), nb::arg("tau"), nb::arg("threads"));
    m.def("take_moved", &moved_further, x(), residual(), nb::arg("moved").noconvert(), nb::arg("scale"),
          nb::arg("threads"));
    m.def("take_threshold", &threshold, x(), residual(), nb::arg("tau"), nb::arg("threads"));
    m.def("pack_indices", &pack, nb::arg("indices").noconvert(), nb::arg("n"));
    m.def("unpack_indices", &unpack, nb::arg("message").noconvert(), nb::arg("n"));
    m.def("add_at", &add_values, nb::arg("total").noconvert(), nb::arg("indices").noconvert(),
          nb::arg("values").noconvert());
    m.def("sign_pack", &signs, x(), residual(), nb::arg("bucket"), nb::arg("two"), nb::arg("threads"));
    m.def("add_sign", &add_signs, nb::arg("total").noconvert(), nb::arg("packed").noconvert(),
          nb::arg("scales").noconvert(), nb::arg("bucket"), nb::arg("threads"));
    m.def("quantise", &levels_of, x(), residual(), nb::arg("levels"), nb::arg("bucket"), nb::arg("l2"),
          nb::arg("stochastic"), nb::arg("seed"), nb::arg("threads"));
    m.def("add_quantised", &add_levels, nb::arg("total").noconvert(), nb::arg("packed").noconvert(),
          nb::arg("scales").noconvert(), nb::arg("levels"), nb::arg("bucket"), nb::arg("threads"));
    auto of_matrix = [&m](const char *name, auto work, const char *second, const char *third) {
        m.def(name, work, nb::arg("rows").noconvert(), nb::arg("row_bias").noconvert(), nb::arg("columns").noconvert(),
              nb::arg("column_bias").noconvert(), nb::arg("row").noconvert(), nb::arg("column").noconvert(),
              nb::arg("value").noconvert(), nb::arg("mean"), nb::arg(second), nb::arg(third));
    };
    of_matrix("factor_steps", &steps, "lr", "l2");
    of_matrix("factor_errors", &errors, "least", "most");
#if defined(__linux__)
    using Unlocked = nb::call_guard<nb::gil_scoped_release>;
    nb::class_<SharedGroup>(m, "SharedGroup", "One worker's end of sums in memory that the workers share.")
        .def(nb::init<const std::vector<int> &, size_t, double, size_t>(), nb::arg("files"), nb::arg("rank"),
             nb::arg("spin_s"), nb::arg("room"))
        .def_static("bytes", &SharedGroup::bytes, nb::arg("workers"))
        .def("submit", [](SharedGroup &group, uintptr_t address, size_t count, int kind, size_t root) {
                 return group.submit(address, count, SharedGroup::Kind(kind), root);
             }, nb::arg("address"), nb::arg("count"), nb::arg("kind"), nb::arg("root") = 0, Unlocked())
        .def("wait", &SharedGroup::wait, nb::arg("end"), nb::arg("seconds"), Unlocked())
        .def_prop_ro("done", &SharedGroup::done)
        .def("missing", &SharedGroup::missing)
        .def("write", [](SharedGroup &group, size_t start, uintptr_t address, size_t bytes) {
                 return group.write(start, reinterpret_cast<const char *>(address), bytes);
             }, nb::arg("start"), nb::arg("address"), nb::arg("nbytes"), Unlocked())
        .def("read", [](const SharedGroup &group, size_t worker, size_t start, uintptr_t address, size_t bytes) {
                 return group.read(worker, start, reinterpret_cast<char *>(address), bytes);
             }, nb::arg("worker"), nb::arg("start"), nb::arg("address"), nb::arg("nbytes"), Unlocked())
        .def("abort", &SharedGroup::abort)
        .def("leave", &SharedGroup::leave);
#endif
}
