// The exchange of workers on one host: a sum is cut into pieces that stay in the processors' cache, and each piece passes
// through the slots of the workers in three stages, counted in the worker's line of the control block:
//   post  copies this worker's numbers into its slot, except its own chunk;   waits until all have taken the slot's former
//   sum   adds its own chunk of all workers, in the order of ranks;           waits until all have posted the piece
//   take  copies the other chunks from the slots of the workers that added them;  waits until all have summed it
// A small piece is added as a whole by every worker, which needs no third stage. The bits are the same either way.
// A copy needs no third stage either: its root posts its numbers, and the others copy them in the second.
#if defined(__linux__)
#include "shared_memory.hpp"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <ctime>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <system_error>
#include <type_traits>
#include <unistd.h>

#if !defined(MADV_POPULATE_WRITE)
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older ones refuse it
#endif

namespace stretto {

namespace {

constexpr size_t SLOTS = 4;                    // pieces that a worker may be ahead of the slowest one
constexpr size_t PIECE_BYTES = size_t{1} << 18;  // of a slot
constexpr size_t SMALL_BYTES = size_t{1} << 18;  // of all workers together: a piece that is added as a whole
constexpr size_t PAGE = size_t{1} << 16;         // a multiple of every system's page
constexpr size_t LINE = 128;  // bytes that no two workers write: two cache lines, which are fetched in pairs
constexpr double LONG_S = 0.0003;     // of one poll: other processes use this processor, and a sleeper gets it back sooner
constexpr size_t UNPOLLED = 1000;     // waits that sleep immediately after a long poll
constexpr size_t STEP = 1024;  // numbers that are added at a time

struct Half {
    uint16_t bits;
};
struct BFloat {
    uint16_t bits;
};

INLINE float sum_of(float x) { return x; }
INLINE double sum_of(double x) { return x; }
INLINE float sum_of(BFloat x) { return from_bits(uint32_t{x.bits} << 16); }
INLINE float sum_of(Half x) {
    // As the bits of a float, its value times 2^-112; from 2^16 on infinity, or no number.
    float scaled = from_bits(uint32_t{x.bits & 0x7fffu} << 13) * from_bits((127 + 112) << 23);
    uint32_t special = scaled >= 65536.0f ? 0x7f800000u : 0;
    return from_bits(bits_of(scaled) | special | uint32_t{x.bits & 0x8000u} << 16);
}

// Rounds to the nearest, of two to the even one.
INLINE void round_to(BFloat &into, float x) {
    uint32_t bits = bits_of(x), rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
    into.bits = uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}
INLINE void round_to(Half &into, float x) {
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000u;
    bits &= 0x7fffffffu;
    uint32_t tiny = bits_of(from_bits(bits) + 0.5f) - bits_of(0.5f);  // the addition rounds to multiples of 2^-24
    uint32_t normal = (bits - (112u << 23) + 0xfffu + (bits >> 13 & 1)) >> 13;
    uint32_t large = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;
    into.bits = uint16_t(sign | (bits >= 143u << 23 ? large : bits < 113u << 23 ? tiny : normal));
}

template <class T> INLINE void add_all(T *into, T *also, const std::vector<const char *> &from, size_t at, size_t to) {
    using Sum = decltype(sum_of(T{}));
    constexpr bool is_rounded = !std::is_same_v<T, Sum>;
    Sum total[STEP];
    T rounded[is_rounded ? STEP : 1];
    const void *result = total;
    auto of = [&](size_t worker) { return reinterpret_cast<const T *>(from[worker]); };
    for (; at < to; at += STEP) {
        size_t n = std::min(STEP, to - at);
        const T *first = of(0) + at, *second = of(1) + at;
        for (size_t i = 0; i < n; ++i) total[i] = sum_of(first[i]) + sum_of(second[i]);
        for (size_t worker = 2; worker < from.size(); ++worker) {
            const T *next = of(worker) + at;
            for (size_t i = 0; i < n; ++i) total[i] += sum_of(next[i]);
        }
        if constexpr (is_rounded) {
            for (size_t i = 0; i < n; ++i) round_to(rounded[i], total[i]);
            result = rounded;
        }
        std::memcpy(into + at, result, n * sizeof(T));
        if (also) std::memcpy(also + at, result, n * sizeof(T));
    }
}

using Sources = std::vector<const char *>;
EACH_CPU void add(float *into, float *also, const Sources &from, size_t at, size_t to) { add_all(into, also, from, at, to); }
EACH_CPU void add(double *into, double *also, const Sources &from, size_t at, size_t to) { add_all(into, also, from, at, to); }
EACH_CPU void add(Half *into, Half *also, const Sources &from, size_t at, size_t to) { add_all(into, also, from, at, to); }
EACH_CPU void add(BFloat *into, BFloat *also, const Sources &from, size_t at, size_t to) { add_all(into, also, from, at, to); }

template <class T> void add_as(char *into, char *also, const Sources &from, size_t at, size_t to) {
    add(reinterpret_cast<T *>(into), reinterpret_cast<T *>(also), from, at, to);
}

constexpr size_t ITEMS[] = {4, 8, 2, 2, 1};  // bytes of a number of each kind

double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

void futex(std::atomic<uint32_t> &word, int verb, uint32_t value, const timespec *limit = nullptr) {
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), verb, value, limit, nullptr, 0);
}

}  // namespace

struct alignas(LINE) SharedGroup::Line {
    std::atomic<uint64_t> posted, summed, done;
    std::atomic<uint64_t> shape[SLOTS];  // of the piece in each slot
    std::atomic<uint32_t> left;
};

struct alignas(LINE) SharedGroup::Control {
    char name[LINE];  // written and compared by Python
    std::atomic<uint32_t> signal, waiting, aborted;
    Line lines[1];  // one for each worker
    static size_t bytes(size_t workers) { return (sizeof(Control) + workers * sizeof(Line) + PAGE - 1) / PAGE * PAGE; }
};

SharedGroup::Mapping::Mapping(int file, size_t size, size_t offset, bool writable, bool populated)
    : bytes(size) {
    int use = PROT_READ | (writable ? PROT_WRITE : 0);
    void *memory = mmap(nullptr, size, use, MAP_SHARED | (populated ? MAP_POPULATE : 0), file, off_t(offset));
    if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "can't map memory");
    data = static_cast<char *>(memory);
}

SharedGroup::Mapping::~Mapping() {
    if (data) munmap(data, bytes);
}

SharedGroup::SharedGroup(const std::vector<int> &files, size_t rank, double spin_s, size_t room)
    : rank_(rank), workers_(files.size()), spin_s_(spin_s), shared_(files.at(0), Control::bytes(workers_), 0, true),
      control_(reinterpret_cast<Control *>(shared_.data)) {
    for (size_t worker = 0; worker < workers_; ++worker) {
        slots_.emplace_back(files[worker], SLOTS * PIECE_BYTES, shared_.bytes, worker == rank);
        rooms_.emplace_back(files[worker], room, bytes(workers_), worker == rank, false);
    }
}

size_t SharedGroup::bytes(size_t workers) { return Control::bytes(workers) + SLOTS * PIECE_BYTES; }

bool SharedGroup::Piece::whole(size_t workers) const { return kind == COPY || count * item * workers <= SMALL_BYTES; }

Range SharedGroup::chunk(const Piece &piece, size_t worker) const {
    size_t units = (piece.count + BLOCK - 1) / BLOCK;
    auto edge = [&](size_t of) { return std::min(units * of / workers_ * BLOCK, piece.count); };
    return {edge(worker), edge(worker + 1)};
}

char *SharedGroup::slot(size_t worker, uint64_t piece) const { return slots_[worker].data + piece % SLOTS * PIECE_BYTES; }

uint64_t SharedGroup::submit(uintptr_t address, size_t count, Kind kind, size_t root) {
    auto *data = reinterpret_cast<char *>(address);
    size_t item = ITEMS[kind], most = PIECE_BYTES / item;
    for (size_t at = 0; at < count; at += most, ++queued_)
        pieces_.push_back({data + at * item, std::min(most, count - at), item, root, kind});
    while (advance()) {
    }
    return queued_;
}

int SharedGroup::wait(uint64_t end, double seconds) {
    for (double until = now() + seconds;; pause(until)) {
        while (done_ < end && advance()) {
        }
        if (done_ >= end) return DONE;
        if (different_) return DIFFERENT;
        if (control_->aborted.load()) return ABORTED;
        if (has_left()) return LEFT;
        if (now() >= until) return LATE;
    }
}

bool SharedGroup::all(Counter counter, uint64_t least) const {
    for (size_t worker = 0; worker < workers_; ++worker)
        if ((control_->lines[worker].*counter).load() < least) return false;
    return true;
}

bool SharedGroup::can_post() const {
    return posted_ < queued_ && (posted_ < SLOTS || all(&Line::done, posted_ + 1 - SLOTS));
}
bool SharedGroup::can_sum() const { return summed_ < posted_ && all(&Line::posted, summed_ + 1); }
bool SharedGroup::can_take() const { return done_ < summed_ && all(&Line::summed, done_ + 1); }
bool SharedGroup::ready() const { return can_post() || can_sum() || can_take() || control_->aborted.load(); }

// Takes one stage further what needs no wait. Returns false if nothing does.
bool SharedGroup::advance() {
    if (different_ || control_->aborted.load()) return false;
    if (can_post()) return post(posted_ + 1), true;
    if (can_sum()) return same_shape(summed_ + 1) && (sum(summed_ + 1), true);
    if (can_take()) return take(done_ + 1), true;
    return false;
}

bool SharedGroup::same_shape(uint64_t number) {
    for (size_t worker = 0; worker < workers_; ++worker)
        different_ |= control_->lines[worker].shape[number % SLOTS].load() != piece(number).shape();
    return !different_;
}

void SharedGroup::post(uint64_t number) {
    const Piece &mine = piece(number);
    char *into = slot(rank_, number);
    auto [from, to] = mine.whole(workers_) ? Range{mine.count, mine.count} : chunk(mine, rank_);
    if (mine.kind != COPY || rank_ == mine.root) {
        std::memcpy(into, mine.data, from * mine.item);
        std::memcpy(into + to * mine.item, mine.data + to * mine.item, (mine.count - to) * mine.item);
    }
    control_->lines[rank_].shape[number % SLOTS].store(mine.shape());
    posted_ = number;
    publish(&Line::posted, number);
}

void SharedGroup::sum(uint64_t number) {
    const Piece mine = piece(number);
    bool whole = mine.whole(workers_);
    auto [from, to] = whole ? Range{0, mine.count} : chunk(mine, rank_);
    Sources sources;
    for (size_t worker = 0; worker < workers_; ++worker)
        sources.push_back(worker == rank_ ? mine.data : slot(worker, number));
    char *also = whole ? nullptr : slot(rank_, number);
    switch (mine.kind) {
        case FLOAT32: add_as<float>(mine.data, also, sources, from, to); break;
        case FLOAT64: add_as<double>(mine.data, also, sources, from, to); break;
        case FLOAT16: add_as<Half>(mine.data, also, sources, from, to); break;
        case BFLOAT16: add_as<BFloat>(mine.data, also, sources, from, to); break;
        case COPY:
            if (rank_ != mine.root) std::memcpy(mine.data, sources[mine.root], mine.count);
    }
    summed_ = number;
    publish(&Line::summed, number);
    // No other worker's chunk is awaited: the slots can be used again once all have added them.
    if (whole && done_ + 1 == number) pieces_.pop_front(), publish(&Line::done, done_ = number);
}

void SharedGroup::take(uint64_t number) {
    const Piece &mine = piece(number);
    for (size_t worker = 0; worker < workers_ && !mine.whole(workers_); ++worker) {
        auto [from, to] = chunk(mine, worker);
        if (worker != rank_)
            std::memcpy(mine.data + from * mine.item, slot(worker, number) + from * mine.item, (to - from) * mine.item);
    }
    pieces_.pop_front();
    publish(&Line::done, done_ = number);
}

// Stores a counter of this worker, and wakes the others if it was the last to reach this number.
void SharedGroup::publish(Counter counter, uint64_t number) {
    (control_->lines[rank_].*counter).store(number);
    if (all(counter, number)) signal();
}

void SharedGroup::signal() {
    control_->signal.fetch_add(1);
    if (control_->waiting.load()) futex(control_->signal, FUTEX_WAKE, INT_MAX);
}

// Waits until a stage is possible, the group is aborted or the time is over; may return earlier.
void SharedGroup::pause(double until) {
    if (unpolled_) --unpolled_;
    for (double at = now(), end = at + spin_s_; at < end && !unpolled_;) {
        sched_yield();
        if (ready()) return;
        double before = std::exchange(at, now());
        if (at - before > LONG_S) unpolled_ = UNPOLLED;
    }
    control_->waiting.fetch_add(1);
    uint32_t seen = control_->signal.load();
    if (double left = until - now(); !ready() && left > 0) {
        timespec limit{time_t(left), long(1e9 * (left - double(time_t(left))))};
        futex(control_->signal, FUTEX_WAIT, seen, &limit);
    }
    control_->waiting.fetch_sub(1);
}

// True if a worker has not reached the stage that this worker's next piece waits for.
bool SharedGroup::is_awaited(size_t worker) const {
    const Line &line = control_->lines[worker];
    return (summed_ > done_ ? line.summed : line.posted).load() <= done_;
}

bool SharedGroup::has_left() const {
    for (size_t worker = 0; worker < workers_; ++worker)
        if (control_->lines[worker].left.load() && is_awaited(worker)) return true;
    return false;
}

std::vector<size_t> SharedGroup::missing() const {
    std::vector<size_t> found;
    for (size_t worker = 0; worker < workers_; ++worker)
        if (worker != rank_ && is_awaited(worker)) found.push_back(worker);
    return found;
}

bool SharedGroup::write(size_t start, const char *data, size_t bytes) {
    const Mapping &own = rooms_[rank_];
    if (start > own.bytes || bytes > own.bytes - start) return false;
    char *first = own.data + start / PAGE * PAGE;
    if (madvise(first, size_t(own.data + start + bytes - first), MADV_POPULATE_WRITE)) return false;
    memcpy(own.data + start, data, bytes);
    return true;
}

bool SharedGroup::read(size_t worker, size_t start, char *data, size_t bytes) const {
    const Mapping &from = rooms_.at(worker);
    if (start > from.bytes || bytes > from.bytes - start) return false;
    memcpy(data, from.data + start, bytes);
    char *first = from.data + start / PAGE * PAGE;
    madvise(first, size_t(from.data + start + bytes - first), MADV_DONTNEED);  // the pages count in this process, too
    return true;
}

void SharedGroup::abort() {
    control_->aborted.store(1);
    signal();
}

void SharedGroup::leave() {
    control_->lines[rank_].left.store(1);
    signal();
}

}  // namespace stretto
#endif
