// The exchange of workers on one host through memory that they share; stretto/transport/shared_memory.py describes it.
#pragma once

#include "kernels.hpp"

#include <atomic>
#include <deque>

namespace stretto {

// One worker's end of a group. Each worker writes only its own data and its own line of the control block; both are
// memory files whose mappings end with the process, so that a killed worker leaves neither locks nor files.
class SharedGroup {
  public:
    enum Outcome { DONE, LATE, ABORTED, LEFT, DIFFERENT };
    enum Kind { FLOAT32, FLOAT64, FLOAT16, BFLOAT16, COPY };

    // `files` are the memory files of all workers in the order of ranks, each of `bytes(workers)` bytes, after which
    // `room` bytes may have no memory yet. A wait polls for `spin_s` seconds before it sleeps.
    SharedGroup(const std::vector<int> &files, size_t rank, double spin_s, size_t room);

    static size_t bytes(size_t workers);

    // Appends the sum of `count` numbers, begins it without waiting, and returns its last piece. Half precision is added
    // in float32 and rounded once. A COPY has bytes for numbers, and all workers receive those of the worker `root`.
    uint64_t submit(uintptr_t address, size_t count, Kind kind, size_t root);
    // Completes all pieces up to `end` within some seconds: an Outcome. After LATE it can be called again.
    int wait(uint64_t end, double seconds);
    // Number of pieces that are complete at this worker.
    uint64_t done() const { return done_; }
    // Ranks of workers that have not contributed to this worker's next piece.
    std::vector<size_t> missing() const;
    // Copies bytes into the room of this worker; returns false if there is no memory for them.
    bool write(size_t start, const char *data, size_t bytes);
    // Copies bytes from the room of a worker; returns false if they are not all in it.
    bool read(size_t worker, size_t start, char *data, size_t bytes) const;
    // Ends all waits of all workers. Callable from any thread.
    void abort();
    // Announces that this worker contributes no more.
    void leave();

  private:
    struct Line;
    struct Control;
    struct Mapping {
        Mapping(int file, size_t size, size_t offset, bool writable, bool populated = true);
        Mapping(Mapping &&other) noexcept : data(std::exchange(other.data, nullptr)), bytes(other.bytes) {}
        ~Mapping();
        char *data;
        size_t bytes;
    };
    struct Piece {
        char *data;
        size_t count, item, root;
        Kind kind;
        uint64_t shape() const { return uint64_t{count} << 32 | root << 8 | kind; }
        bool whole(size_t workers) const;
    };
    using Counter = std::atomic<uint64_t> Line::*;

    Range chunk(const Piece &piece, size_t worker) const;
    char *slot(size_t worker, uint64_t piece) const;
    const Piece &piece(uint64_t number) const { return pieces_[number - done_ - 1]; }
    bool all(Counter counter, uint64_t least) const;
    bool can_post() const, can_sum() const, can_take() const;
    bool ready() const;
    bool advance();
    bool same_shape(uint64_t number);
    void post(uint64_t number), sum(uint64_t number), take(uint64_t number);
    void publish(Counter counter, uint64_t number);
    void signal();
    void pause(double until);
    bool is_awaited(size_t worker) const, has_left() const;

    size_t rank_, workers_;
    double spin_s_;
    size_t unpolled_ = 0;
    Mapping shared_;
    Control *control_;
    std::vector<Mapping> slots_, rooms_;
    std::deque<Piece> pieces_;  // those after done_
    uint64_t queued_ = 0, posted_ = 0, summed_ = 0, done_ = 0;
    bool different_ = false;
};

}  // namespace stretto
