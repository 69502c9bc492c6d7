// Shared by the kernels: numbers as bits, growing arrays, division of work among threads.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <thread>
#include <utility>
#include <vector>

// One binary for all x86-64: functions with this mark are compiled for several levels, and the loader selects the best
// that the processor supports. On other machines they are plain functions.
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__GLIBC__)
#if __GNUC__ >= 12
#define EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#else
#define EACH_CPU
#endif

#if defined(__GNUC__)
#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))
#else
#define INLINE __forceinline
#define INLINE_LAMBDA
#endif

namespace stretto {

using std::size_t;

constexpr size_t BLOCK = 64;              // numbers processed together
constexpr size_t GRAIN = size_t{1} << 17;  // numbers that justify a further thread

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float from_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// The magnitude as a whole number of the same order: |a| < |b| if and only if key(a) < key(b).
INLINE uint32_t key_of(float x) { return bits_of(x) & 0x7fffffffu; }

INLINE int lowest_bit(uint64_t bits) {
#if defined(__GNUC__)
    return __builtin_ctzll(bits);
#else
    int at = 0;
    while (!(bits >> at & 1)) ++at;
    return at;
#endif
}

// Packs 64 bytes of 0 or 1 into bits, the first the least significant.
INLINE uint64_t mask_of(const uint8_t *flags) {
    uint64_t mask = 0;
    for (int group = 0; group < 8; ++group) {
        uint64_t eight;
        std::memcpy(&eight, flags + 8 * group, 8);
        mask |= (eight * 0x0102040810204080u >> 56) << 8 * group;
    }
    return mask;
}

// An array from malloc whose ownership can be passed on.
template <class T> class Array {
  public:
    Array() = default;
    explicit Array(size_t size, bool zeroed = false) : size_(size), room_(size) {
        size_t bytes = (size ? size : 1) * sizeof(T);
        data_ = static_cast<T *>(zeroed ? std::calloc(bytes, 1) : std::malloc(bytes));
        if (!data_) throw std::bad_alloc();
    }
    Array(Array &&other) noexcept { *this = std::move(other); }
    Array &operator=(Array &&other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        std::swap(room_, other.room_);
        return *this;
    }
    Array(const Array &) = delete;
    ~Array() { std::free(data_); }

    T *data() { return data_; }
    const T *data() const { return data_; }
    size_t size() const { return size_; }
    T &operator[](size_t at) { return data_[at]; }

    // Reserves room for `more` at the end, which the caller fills and counts with `grown`.
    T *end_with_room(size_t more) {
        if (size_ + more > room_) resize_room(2 * size_ + more);
        return data_ + size_;
    }
    void grown(size_t by) { size_ += by; }
    void shorten(size_t size) { size_ = size; }
    void fit() { resize_room(size_); }
    T *release() { return std::exchange(data_, nullptr); }

  private:
    void resize_room(size_t room) {
        void *moved = std::realloc(static_cast<void *>(data_), (room ? room : 1) * sizeof(T));
        if (!moved) throw std::bad_alloc();
        data_ = static_cast<T *>(moved);
        room_ = room;
    }
    T *data_ = nullptr;
    size_t size_ = 0, room_ = 0;
};

struct Range {
    size_t from, to;
};

// n numbers in at most `threads` ranges that begin at multiples of `unit`.
inline std::vector<Range> parts(size_t n, size_t threads, size_t unit) {
    size_t units = (n + unit - 1) / unit;
    size_t wanted = n / GRAIN < threads ? n / GRAIN : threads;
    size_t count = wanted < 1 ? 1 : wanted;
    std::vector<Range> found;
    for (size_t part = 0; part < count; ++part) {
        size_t from = units * part / count * unit, to = units * (part + 1) / count * unit;
        if (to > n) to = n;
        if (from < to || part == 0) found.push_back({from < to ? from : to, to});
    }
    return found;
}

// Calls work(part) for every part, each in a thread of its own, the first in the caller's.
template <class Work> void together(size_t count, const Work &work) {
    std::vector<std::exception_ptr> failed(count);
    auto guarded = [&](size_t part) {
        try {
            work(part);
        } catch (...) {
            failed[part] = std::current_exception();
        }
    };
    std::vector<std::thread> threads;
    for (size_t part = 1; part < count; ++part) {
        try {
            threads.emplace_back(guarded, part);
        } catch (const std::exception &) {  // no further thread can be started
            guarded(part);
        }
    }
    guarded(0);
    for (auto &thread : threads) thread.join();
    for (auto &one : failed)
        if (one) std::rethrow_exception(one);
}

// sparsify.cpp
struct Picks {
    Array<int32_t> indices;
    Array<float> values;
};
struct Steps {
    Array<int32_t> indices;
    Array<uint8_t> negative;
};
Picks take_largest(const float *x, float *residual, size_t n, size_t k, size_t threads);
Picks take_largest_per_chunk(const float *x, float *residual, size_t n, size_t chunk, size_t k, size_t threads);
Picks take_above(const float *x, float *residual, size_t n, float tau, size_t threads);
Picks take_moved(const float *x, float *residual, const float *moved, size_t n, float scale, size_t threads);
Steps take_threshold(const float *x, float *residual, size_t n, float tau, size_t threads);
void add_at(float *total, size_t n, const int32_t *indices, const float *values, size_t count);

// index_coding.cpp
Array<uint8_t> pack_indices(const int32_t *indices, size_t count, size_t n);
std::pair<Array<int32_t>, size_t> unpack_indices(const uint8_t *message, size_t length, size_t n);

// quantize.cpp
struct Coded {
    Array<uint8_t> packed;
    Array<float> scales;
};
Coded sign_pack(const float *x, float *residual, size_t n, size_t bucket, bool two, size_t threads);
void add_sign(float *total, size_t n, const uint8_t *packed, const float *scales, size_t bucket, size_t threads);
Coded quantise(const float *x, float *residual, size_t n, int levels, size_t bucket, bool l2, bool stochastic,
               uint32_t seed, size_t threads);
void add_quantised(float *total, size_t n, const uint8_t *packed, const float *scales, int levels, size_t bucket,
                   size_t threads);
size_t packed_bytes(size_t n, int levels);

// factorise.cpp
struct Factors {  // of rows and columns, `rank` numbers each, a multiple of 8, and a bias
    float *rows, *row_bias, *columns, *column_bias;
    size_t rank;
};
struct Known {  // values of a matrix, each with the number of its row and of its column
    const int32_t *row, *column;
    const float *value;
    size_t count;
};
void factor_steps(const Factors &of, const Known &known, float mean, float lr, float l2);
double factor_errors(const Factors &of, const Known &known, float mean, float least, float most);

}  // namespace stretto
