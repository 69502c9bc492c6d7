// Quantisation: signs with two magnitudes a bucket, and levels of a bucket's norm.
#include "kernels.hpp"

#include <algorithm>
#include <limits>

namespace stretto {
namespace {

constexpr float MOST = std::numeric_limits<float>::max();
constexpr size_t ALIGNED = 40;  // numbers that fill whole bytes in every packing

size_t greatest_common(size_t a, size_t b) { return b ? greatest_common(b, a % b) : a; }

// Ranges of whole buckets that fill whole bytes.
std::vector<Range> bucket_parts(size_t n, size_t threads, size_t bucket) {
    return parts(n, threads, ALIGNED / greatest_common(ALIGNED, bucket) * bucket);
}

// Computes a = residual + x of one tile, also into `residual` if there is one.
template <bool RESIDUAL> INLINE void tile_of(const float *x, float *residual, size_t length, float *a) {
    for (size_t j = 0; j < length; ++j) {
        float sum = RESIDUAL ? residual[j] + x[j] : x[j];
        a[j] = sum;
        if (RESIDUAL) residual[j] = sum;
    }
}

// ---- sums in float64 ------------------------------------------------------------------------------------------------
// LANES running sums, number i in lane i mod LANES, added in order at the end: equal for all processors and thread
// counts. Each is within n / 2^53 of the exact sum, so rounded to float32 it is the reference's or its
// neighbour.

constexpr size_t LANES = 16;

struct Lanes {
    double held[LANES] = {};

    INLINE void add(const float *block) {
        for (size_t lane = 0; lane < LANES; ++lane) {
            double sum = held[lane];
            for (size_t j = lane; j < BLOCK; j += LANES) sum += double(block[j]);
            held[lane] = sum;
        }
    }
    INLINE void add_squares(const float *block) {
        for (size_t lane = 0; lane < LANES; ++lane) {
            double sum = held[lane];
            for (size_t j = lane; j < BLOCK; j += LANES) sum += double(block[j]) * double(block[j]);
            held[lane] = sum;
        }
    }
    double total() const {
        double sum = 0;
        for (double lane : held) sum += lane;
        return sum;
    }
};

// ---- signs ---------------------------------------------------------------------------------------------------------

// Writes `count` bits from position `at`, into bytes that are zero.
INLINE void put_bits(uint8_t *packed, size_t at, uint64_t mask, size_t count) {
    if (at % 8 == 0) {
        for (size_t byte = 0; byte < (count + 7) / 8; ++byte) packed[at / 8 + byte] |= uint8_t(mask >> 8 * byte);
        return;
    }
    for (size_t j = 0; j < count; ++j) packed[(at + j) / 8] |= uint8_t((mask >> j & 1) << (at + j) % 8);
}

struct Sums {
    double below, above;  // of the negative entries and of the others; or of all magnitudes, in `above`
    size_t positive;
};

INLINE uint64_t signs_of(const float *a) {
    uint8_t flags[BLOCK];
    for (size_t j = 0; j < BLOCK; ++j) flags[j] = a[j] >= 0.0f ? 1 : 0;
    return mask_of(flags);
}

INLINE size_t ones(uint64_t mask) {
#if defined(__GNUC__)
    return size_t(__builtin_popcountll(mask));
#else
    size_t count = 0;
    for (; mask; mask &= mask - 1) ++count;
    return count;
#endif
}

// First pass over one bucket: a = residual + x, the bits, the sums.
template <bool RESIDUAL, bool TWO>
INLINE Sums sign_sums(const float *x, float *residual, size_t first, size_t count, uint8_t *packed) {
    Lanes above, below;
    size_t positive = 0;
    auto step = [&](size_t at, size_t length) INLINE_LAMBDA {
        float a[BLOCK] = {};
        tile_of<RESIDUAL>(x + at, residual + at, length, a);
        uint64_t mask = signs_of(a);
        if (length < BLOCK) mask &= (uint64_t{1} << length) - 1;
        put_bits(packed, at, mask, length);
        positive += ones(mask);
        float up[BLOCK], down[BLOCK];
        for (size_t j = 0; j < BLOCK; ++j) {
            float one = a[j], other = one >= 0.0f ? one : 0.0f;
            up[j] = TWO ? other : std::fabs(one);
            if (TWO) down[j] = one - other;
        }
        above.add(up);
        if (TWO) below.add(down);
    };
    size_t at = first, end = first + count;
    for (; at + BLOCK <= end; at += BLOCK) step(at, BLOCK);
    if (at < end) step(at, end - at);
    return {below.total(), above.total(), positive};
}

float rounded(double mean) { return float(std::min(std::max(mean, -double(MOST)), double(MOST))); }

void sign_scales(const Sums &sums, size_t count, bool two, float *scales) {
    size_t negative = count - sums.positive;
    double above = sums.above / double(two ? std::max(sums.positive, size_t{1}) : count);
    scales[0] = rounded(two ? sums.below / double(std::max(negative, size_t{1})) : -above);
    scales[1] = rounded(above);
}

INLINE void less_signs(float *residual, size_t count, float low, float high) {
    for (size_t j = 0; j < count; ++j) residual[j] -= residual[j] >= 0.0f ? high : low;
}

template <bool RESIDUAL, bool TWO>
INLINE void signs(const float *x, float *residual, Range range, size_t bucket, uint8_t *packed, float *scales) {
    for (size_t at = range.from; at < range.to; at += bucket) {
        size_t count = std::min(bucket, range.to - at);
        float *pair = scales + at / bucket * 2;
        sign_scales(sign_sums<RESIDUAL, TWO>(x, residual, at, count, packed), count, TWO, pair);
        if (RESIDUAL) less_signs(residual + at, count, pair[0], pair[1]);
    }
}

#define SIGNS(name, RESIDUAL, TWO)                                                                                     \
    EACH_CPU void name(const float *x, float *residual, Range range, size_t bucket, uint8_t *packed, float *scales) {  \
        signs<RESIDUAL, TWO>(x, residual, range, bucket, packed, scales);                                              \
    }

SIGNS(signs_residual_two, true, true)
SIGNS(signs_residual_one, true, false)
SIGNS(signs_two, false, true)
SIGNS(signs_one, false, false)

// Expands the bits of a byte to eight bytes, zero or nonzero.
INLINE void spread(uint8_t byte, uint8_t *flags) {
    uint64_t eight = byte * 0x0101010101010101u & 0x8040201008040201u;
    std::memcpy(flags, &eight, 8);
}

EACH_CPU void add_signs(float *total, Range range, const uint8_t *packed, const float *scales, size_t bucket) {
    for (size_t from = range.from; from < range.to;) {
        size_t end = std::min((from / bucket + 1) * bucket, range.to);
        float low = scales[from / bucket * 2], high = scales[from / bucket * 2 + 1];
        size_t i = from;
        for (; i < end && i % 8; ++i) total[i] += packed[i / 8] >> i % 8 & 1 ? high : low;
        for (; i + BLOCK <= end; i += BLOCK) {
            uint8_t flags[BLOCK];
            for (size_t byte = 0; byte < BLOCK / 8; ++byte) spread(packed[i / 8 + byte], flags + 8 * byte);
            for (size_t j = 0; j < BLOCK; ++j) total[i + j] += flags[j] ? high : low;
        }
        for (; i < end; ++i) total[i] += packed[i / 8] >> i % 8 & 1 ? high : low;
        from = end;
    }
}

// ---- levels --------------------------------------------------------------------------------------------------------

INLINE float noise_of(uint32_t start, uint32_t i) {
    uint32_t z = i + start;
    z ^= z >> 16;
    z *= 0x7feb352du;
    z ^= z >> 15;
    z *= 0x846ca68bu;
    z ^= z >> 16;
    return float(int32_t(z >> 8)) * 0x1p-24f;
}

// Packs codes of s levels, in runs that need not fill whole bytes.
template <int S> class Packer {
  public:
    explicit Packer(uint8_t *out) : out_(out) {}

    INLINE void put(const uint8_t *codes, size_t count) {
        if (filled_ > HELD - BLOCK) pack_whole();
        uint8_t *to = S == 127 ? out_ : held_ + filled_;  // a code a byte: nothing to pack
        std::memcpy(to, codes, count);
        if (S == 127)
            out_ += count;
        else
            filled_ += count;
    }

    INLINE void pack_whole() {
        size_t units = filled_ / UNIT;
        pack(units);
        std::memmove(held_, held_ + units * UNIT, filled_ - units * UNIT);
        filled_ -= units * UNIT;
    }
    INLINE void finish() {
        pack_whole();
        if (!filled_) return;
        std::memset(held_ + filled_, 0, UNIT - filled_);
        pack(1);
    }

  private:
    static constexpr size_t UNIT = S == 7 ? 2 : 5, HELD = 4096;

    INLINE void pack(size_t units) {
        const uint8_t *held = held_;
        for (size_t i = 0; i < units; ++i) {
            const uint8_t *code = held + i * UNIT;
            if (S == 7) out_[i] = uint8_t(code[0] | code[1] << 4);
            if (S == 1) out_[i] = uint8_t(code[0] + 3 * code[1] + 9 * code[2] + 27 * code[3] + 81 * code[4]);
        }
        out_ += units;
    }
    uint8_t held_[HELD + BLOCK];
    size_t filled_ = 0;
    uint8_t *out_;
};

// First pass over one bucket: a = residual + x, and its norm.
template <bool RESIDUAL> INLINE float length_of(const float *x, float *residual, size_t count) {
    Lanes lanes;
    auto step = [&](size_t at, size_t length) INLINE_LAMBDA {
        float a[BLOCK] = {};
        tile_of<RESIDUAL>(x + at, residual + at, length, a);
        lanes.add_squares(a);
    };
    size_t at = 0;
    for (; at + BLOCK <= count; at += BLOCK) step(at, BLOCK);
    if (at < count) step(at, count - at);
    return float(std::min(std::sqrt(lanes.total()), double(MOST)));
}

template <bool RESIDUAL> INLINE float largest(const float *x, float *residual, size_t count) {
    uint32_t most = 0;
    for (size_t j = 0; j < count; ++j) {
        float a = RESIDUAL ? residual[j] + x[j] : x[j];
        if (RESIDUAL) residual[j] = a;
        most = std::max(most, key_of(a));
    }
    return std::min(from_bits(most), MOST);
}

// Second pass over one bucket. `start` is the first value of the noise's counter; unused without noise.
template <int S, bool RESIDUAL, bool NOISE>
INLINE void levels_of(const float *x, float *residual, size_t at, size_t count, float norm, uint32_t start,
                      Packer<S> &packer) {
    const float step = norm / float(S), s = float(S), size = norm > 0.0f ? norm : 1.0f;  // of zeros, all are 0
    auto code = [&](size_t from, size_t length) INLINE_LAMBDA {
        uint8_t codes[BLOCK];  // a local array: bytes written through a pointer may alias anything
        for (size_t j = 0; j < length; ++j) {
            float a = RESIDUAL ? residual[from + j] : x[from + j];
            float upper = std::fabs(a) / size * s + (NOISE ? noise_of(start, uint32_t(from + j)) : 0.5f);
            int32_t level = int32_t(upper < s ? upper : s);
            int32_t signed_level = bits_of(a) >> 31 ? -level : level;
            codes[j] = uint8_t(signed_level + S);
            if (RESIDUAL) residual[from + j] = a - float(signed_level) * step;
        }
        packer.put(codes, length);
    };
    size_t from = at, end = at + count;
    for (; from + BLOCK <= end; from += BLOCK) code(from, BLOCK);
    if (from < end) code(from, end - from);
}

template <int S, bool RESIDUAL, bool NOISE>
INLINE void quantised(const float *x, float *residual, Range range, size_t bucket, bool l2, uint32_t start,
    uint8_t *packed,
                      float *scales) {
    Packer<S> packer(packed);
    for (size_t at = range.from; at < range.to; at += bucket) {
        size_t count = std::min(bucket, range.to - at);
        float norm = l2 ? length_of<RESIDUAL>(x + at, residual + at, count) : largest<RESIDUAL>(x + at, residual + at,
            count);
        scales[at / bucket] = norm;
        levels_of<S, RESIDUAL, NOISE>(x, residual, at, count, norm, start, packer);
    }
    packer.finish();
}

#define QUANTISED(name, S, RESIDUAL, NOISE)                                                                            \
    EACH_CPU void name(const float *x, float *residual, Range range, size_t bucket, bool l2, uint32_t start,           \
                       uint8_t *packed, float *scales) {                                                               \
        quantised<S, RESIDUAL, NOISE>(x, residual, range, bucket, l2, start, packed, scales);                          \
    }
#define QUANTISED_OF(S)                                                                                                \
    QUANTISED(nearest_residual_##S, S, true, false)                                                                    \
    QUANTISED(noisy_residual_##S, S, true, true)                                                                       \
    QUANTISED(nearest_##S, S, false, false)                                                                            \
    QUANTISED(noisy_##S, S, false, true)

QUANTISED_OF(127)
QUANTISED_OF(7)
QUANTISED_OF(1)

// Codes of five digits to base 3; bytes that no packing produces decode to some codes.
struct Trits {
    uint8_t five[256][8];
    Trits() {
        for (int byte = 0; byte < 256; ++byte)
            for (int at = 0, rest = byte; at < 8; ++at, rest /= 3) five[byte][at] = uint8_t(rest % 3);
    }
};
const Trits TRITS;

// Returns at most BLOCK codes from number `at`: unpacked into `room` (16 bytes longer), or in place.
template <int S> INLINE const uint8_t *codes_of(const uint8_t *packed, size_t at, size_t length, uint8_t *room) {
    if (S == 127) return packed + at;
    if (S == 7) {
        size_t skipped = at & 1, bytes = (skipped + length + 1) / 2;
        for (size_t i = 0; i < bytes; ++i) {
            uint8_t two = packed[at / 2 + i];
            room[2 * i] = two & 15;
            room[2 * i + 1] = two >> 4;
        }
        return room + skipped;
    }
    size_t skipped = at % 5, bytes = (skipped + length + 4) / 5;
    for (size_t i = 0; i < bytes; ++i) std::memcpy(room + 5 * i, TRITS.five[packed[at / 5 + i]], 8);
    return room + skipped;
}

template <int S>
INLINE void add_levels(float *total, Range range, const uint8_t *packed, const float *scales, size_t bucket) {
    for (size_t from = range.from; from < range.to;) {
        size_t end = std::min((from / bucket + 1) * bucket, range.to);
        float step = scales[from / bucket] / float(S);
        for (size_t at = from; at < end; at += BLOCK) {
            size_t length = end - at < BLOCK ? end - at : BLOCK;
            uint8_t codes[BLOCK + 16];
            const uint8_t *first = codes_of<S>(packed, at, length, codes);
            for (size_t j = 0; j < length; ++j) total[at + j] += float(int32_t(first[j]) - S) * step;
        }
        from = end;
    }
}

#define ADD_LEVELS(name, S)                                                                                            \
    EACH_CPU void name(float *total, Range range, const uint8_t *packed, const float *scales, size_t bucket) {         \
        add_levels<S>(total, range, packed, scales, bucket);                                                           \
    }

ADD_LEVELS(add_levels_127, 127)
ADD_LEVELS(add_levels_7, 7)
ADD_LEVELS(add_levels_1, 1)

using Quantise = void (*)(const float *, float *, Range, size_t, bool, uint32_t, uint8_t *, float *);

Quantise quantise_of(int levels, bool residual, bool noise) {
    static constexpr int size[] = {127, 7, 1};
    static const Quantise found[][4] = {{nearest_127, noisy_127, nearest_residual_127, noisy_residual_127},
                                        {nearest_7, noisy_7, nearest_residual_7, noisy_residual_7},
                                        {nearest_1, noisy_1, nearest_residual_1, noisy_residual_1}};
    int row = 0;
    while (size[row] != levels) ++row;
    return found[row][2 * residual + noise];
}

}  // namespace

size_t packed_bytes(size_t n, int levels) { return levels == 127 ? n : levels == 7 ? (n + 1) / 2 : (n + 4) / 5; }

Coded sign_pack(const float *x, float *residual, size_t n, size_t bucket, bool two, size_t threads) {
    Coded coded{Array<uint8_t>((n + 7) / 8, true), Array<float>((n + bucket - 1) / bucket * 2)};
    auto work = residual ? (two ? signs_residual_two : signs_residual_one) : (two ? signs_two : signs_one);
    auto ranges = bucket_parts(n, threads, bucket);
    together(ranges.size(), [&](size_t part) {
        work(x, residual, ranges[part], bucket, coded.packed.data(), coded.scales.data());
    });
    return coded;
}

void add_sign(float *total, size_t n, const uint8_t *packed, const float *scales, size_t bucket, size_t threads) {
    auto ranges = parts(n, threads, BLOCK);
    together(ranges.size(), [&](size_t part) { add_signs(total, ranges[part], packed, scales, bucket); });
}

Coded quantise(const float *x, float *residual, size_t n, int levels, size_t bucket, bool l2, bool stochastic,
               uint32_t seed, size_t threads) {
    Coded coded{Array<uint8_t>(packed_bytes(n, levels)), Array<float>((n + bucket - 1) / bucket)};
    auto work = quantise_of(levels, residual != nullptr, stochastic);
    auto ranges = bucket_parts(n, threads, bucket);
    together(ranges.size(), [&](size_t part) {
        uint8_t *packed = coded.packed.data() + packed_bytes(ranges[part].from, levels);
        work(x, residual, ranges[part], bucket, l2, seed * 0x9E3779B9u, packed, coded.scales.data());
    });
    return coded;
}

void add_quantised(float *total, size_t n, const uint8_t *packed, const float *scales, int levels, size_t bucket,
                   size_t threads) {
    auto work = levels == 127 ? add_levels_127 : levels == 7 ? add_levels_7 : add_levels_1;
    auto ranges = parts(n, threads, BLOCK);
    together(ranges.size(), [&](size_t part) { work(total, ranges[part], packed, scales, bucket); });
}

}  // namespace stretto
