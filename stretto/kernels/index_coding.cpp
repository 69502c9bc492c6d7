// Encoding of ascending indices; the format is described in reference/index_coding.py.
#include "kernels.hpp"

#include <algorithm>
#include <stdexcept>

namespace stretto {
namespace {

constexpr uint8_t ALL = 253, BITMAP = 254;
constexpr int MOST_LOW_BITS = 30, TRIED = 4;

// Writes little-endian bits into an array with room for them and eight more bytes.
class Writer {
  public:
    explicit Writer(uint8_t *at) : at_(at) {}

    // At most 56 bits.
    void put(uint64_t bits, int count) {
        held_ |= bits << filled_;
        filled_ += count;
        for (; filled_ >= 8; filled_ -= 8, held_ >>= 8) *at_++ = uint8_t(held_);
    }
    void put_gap(uint64_t gap, int low) {
        uint64_t ones = gap >> low, rest = gap & ((uint64_t{1} << low) - 1);
        for (; ones > 24; ones -= 24) put(0xffffff, 24);
        put(((uint64_t{1} << ones) - 1) | rest << (ones + 1), int(ones) + 1 + low);
    }
    uint8_t *finish() {
        if (filled_) *at_++ = uint8_t(held_);
        return at_;
    }

  private:
    uint8_t *at_;
    uint64_t held_ = 0;
    int filled_ = 0;
};

// Reads these bits; bits after the end are zeros, and `past` is set when one was read.
class Reader {
  public:
    Reader(const uint8_t *from, const uint8_t *to) : at_(from), to_(to) {}

    // Returns the gap, or -1 if it is not below `most`.
    int64_t gap(int low, uint64_t most) {
        uint64_t ones = 0;
        for (;;) {
            fill();
            int run = ~held_ ? lowest_bit(~held_) : 64;
            run = std::min(run, filled_);
            ones += uint64_t(run);
            if (ones << low > most || !filled_) return -1;
            bool ended = run < filled_;
            drop(run);
            if (ended) break;
        }
        drop(1);
        fill();
        if (filled_ < low) return -1;
        uint64_t rest = held_ & ((uint64_t{1} << low) - 1);
        drop(low);
        return int64_t(ones << low | rest);
    }
    bool ends_in_zeros() const { return !(held_ & ((uint64_t{1} << (filled_ & 7)) - 1)); }
    const uint8_t *at() const { return at_ - filled_ / 8; }

  private:
    void fill() {
        if (filled_ <= 32 && to_ - at_ >= 4) {
            uint32_t four = uint32_t(at_[0]) | uint32_t(at_[1]) << 8 | uint32_t(at_[2]) << 16 | uint32_t(at_[3]) << 24;
            held_ |= uint64_t(four) << filled_;
            filled_ += 32;
            at_ += 4;
        }
        for (; filled_ <= 32 && at_ < to_; filled_ += 8) held_ |= uint64_t(*at_++) << filled_;
    }
    void drop(int count) {
        held_ = count < 64 ? held_ >> count : 0;
        filled_ -= count;
    }
    const uint8_t *at_, *to_;
    uint64_t held_ = 0;
    int filled_ = 0;
};

struct Rice {
    int low;
    uint64_t bits;
};

EACH_CPU void add_quotients(const int32_t *indices, size_t count, int first, uint64_t *sums) {
    uint64_t sum0 = 0, sum1 = 0, sum2 = 0, sum3 = 0;
    for (size_t i = 1; i < count; ++i) {
        uint32_t gap = uint32_t(indices[i]) - uint32_t(indices[i - 1]) - 1;
        sum0 += gap >> first;
        sum1 += gap >> (first + 1);
        sum2 += gap >> (first + 2);
        sum3 += gap >> (first + 3);
    }
    sums[0] += sum0, sums[1] += sum1, sums[2] += sum2, sums[3] += sum3;
}

// The parameter with the fewest bits: at floor(log2(mean gap)) or its neighbours -1, +1, +2.
Rice best_rice(const int32_t *indices, size_t count) {
    uint64_t mean = (uint64_t(indices[count - 1]) + 1 - count) / count;
    int middle = 0;
    while (mean >> (middle + 1)) ++middle;
    int first = std::max(middle - 1, 0), last = std::min(middle + 2, MOST_LOW_BITS);
    if (first > 27) first = 27;  // shifts stay below 32
    uint64_t sums[TRIED];
    for (int i = 0; i < TRIED; ++i) sums[i] = uint64_t(indices[0]) >> (first + i);
    add_quotients(indices, count, first, sums);
    Rice best{0, ~uint64_t{0}};
    for (int low = std::max(middle - 1, 0); low <= last; ++low) {
        uint64_t bits = uint64_t(count) * uint64_t(low + 1) + sums[low - first];
        if (bits < best.bits) best = {low, bits};
    }
    return best;
}

size_t varint_bytes(uint64_t number) {
    size_t bytes = 1;
    for (; number >= 128; number >>= 7) ++bytes;
    return bytes;
}

Array<uint8_t> rice_message(const int32_t *indices, size_t count, Rice rice) {
    Array<uint8_t> message(1 + varint_bytes(count) + size_t((rice.bits + 7) / 8));
    uint8_t *at = message.data();
    *at++ = uint8_t(rice.low);
    uint64_t number = count;
    for (; number >= 128; number >>= 7) *at++ = uint8_t(number | 128);
    *at++ = uint8_t(number);
    Writer writer(at);
    int64_t previous = -1;
    for (size_t i = 0; i < count; ++i) {
        writer.put_gap(uint64_t(indices[i] - previous - 1), rice.low);
        previous = indices[i];
    }
    writer.finish();
    return message;
}

Array<uint8_t> bitmap_message(const int32_t *indices, size_t count, size_t n) {
    Array<uint8_t> message(1 + (n + 7) / 8, true);
    message[0] = BITMAP;
    for (size_t i = 0; i < count; ++i) message[1 + size_t(indices[i]) / 8] |= uint8_t(1 << (indices[i] & 7));
    return message;
}

void check(const int32_t *indices, size_t count, size_t n) {
    int64_t previous = -1;
    bool ascending = true;
    for (size_t i = 0; i < count; ++i) {
        ascending &= indices[i] > previous;
        previous = indices[i];
    }
    if (!ascending || previous >= int64_t(n))
        throw std::invalid_argument("indices must ascend, be different and lie inside the tensor");
}

using Unpacked = std::pair<Array<int32_t>, size_t>;

Unpacked all_of(size_t n) {
    Array<int32_t> indices(n);
    for (size_t i = 0; i < n; ++i) indices[i] = int32_t(i);
    return {std::move(indices), 1};
}

Unpacked from_bitmap(const uint8_t *message, size_t length, size_t n) {
    size_t bytes = (n + 7) / 8;
    if (length < 1 + bytes) throw std::invalid_argument("a bitmap of indices is cut off");
    if (n % 8 && message[bytes] >> n % 8) throw std::invalid_argument("a bitmap has ones after its end");
    Array<int32_t> indices;
    for (size_t byte = 0; byte < bytes; ++byte) {
        int32_t *at = indices.end_with_room(8);
        size_t count = 0;
        for (uint64_t bits = message[1 + byte]; bits; bits &= bits - 1)
            at[count++] = int32_t(byte * 8) + lowest_bit(bits);
        indices.grown(count);
    }
    indices.fit();
    return {std::move(indices), 1 + bytes};
}

uint64_t varint(const uint8_t *message, size_t length, size_t &at) {
    uint64_t number = 0;
    for (int shift = 0; shift < 35 && at < length; shift += 7) {
        uint8_t byte = message[at++];
        number |= uint64_t(byte & 127) << shift;
        if (byte < 128) return number;
    }
    throw std::invalid_argument("a message about indices ends in its count, or the count does not end");
}

Unpacked from_rice(const uint8_t *message, size_t length, size_t n) {
    int low = message[0];
    size_t start = 1;
    uint64_t count = varint(message, length, start);
    if (count < 1 || count > n || count * uint64_t(low + 1) > 8 * uint64_t(length - start))
        throw std::invalid_argument("a message about indices has a count of 0, or above what it holds");
    Array<int32_t> indices(count);
    Reader reader(message + start, message + length);
    int64_t previous = -1;
    for (size_t i = 0; i < count; ++i) {
        int64_t gap = reader.gap(low, n);
        if (gap < 0 || previous + 1 + gap >= int64_t(n))
            throw std::invalid_argument("a message about indices is cut off or has an index outside the tensor");
        previous += 1 + gap;
        indices[i] = int32_t(previous);
    }
    if (!reader.ends_in_zeros()) throw std::invalid_argument("a message about indices does not end in zeros");
    return {std::move(indices), size_t(reader.at() - message)};
}

}  // namespace

Array<uint8_t> pack_indices(const int32_t *indices, size_t count, size_t n) {
    check(indices, count, n);
    if (count == 0) return Array<uint8_t>(0);
    if (count == n) {
        Array<uint8_t> message(1);
        message[0] = ALL;
        return message;
    }
    Rice rice = best_rice(indices, count);
    if (1 + varint_bytes(count) + (rice.bits + 7) / 8 <= 1 + (n + 7) / 8) return rice_message(indices, count, rice);
    return bitmap_message(indices, count, n);
}

Unpacked unpack_indices(const uint8_t *message, size_t length, size_t n) {
    if (!length) return {Array<int32_t>(0), 0};
    if (message[0] == ALL && n) return all_of(n);
    if (message[0] == BITMAP) return from_bitmap(message, length, n);
    if (message[0] <= MOST_LOW_BITS) return from_rice(message, length, n);
    throw std::invalid_argument("this is not a message about indices");
}

}  // namespace stretto
