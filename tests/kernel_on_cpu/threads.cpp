// Runs one block of schedule.cu on the CPU: every CUDA thread is a coroutine, and a warp or block operation waits until
// all threads of the warp or block have reached it. `kernel.inc` is the kernel's source, with its shared array named.
#include <algorithm>
#include <cstdlib>
#include <ucontext.h>
using std::max;
using std::min;

typedef unsigned int Word;
struct int4 { int x, y, z, w; };
static int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
struct Dim { Word x; };
struct Here { Word thread; operator Word() const { return thread; } };
static struct { Here x; } threadIdx;
static Dim blockDim;

constexpr Word THREADS = 1024, STACK = 1 << 15, SHARED = 1 << 16;
enum State { RUNNING, AT_WARP, AT_BLOCK, ENDED };
enum Operation { ADD, MIN, UP, FROM, BALLOT, COUNT };
static ucontext_t scheduler, contexts[THREADS];
static State state[THREADS];
static Operation operation[THREADS];
static Word given[THREADS], taken[THREADS], argument[THREADS];
static Word shared_words[SHARED];

static Word meet(State where, Operation what, Word value, Word extra = 0) {
    Word me = threadIdx.x;
    state[me] = where, operation[me] = what, given[me] = value, argument[me] = extra;
    swapcontext(&contexts[me], &scheduler);
    return taken[me];
}
static Word __reduce_add_sync(Word, Word value) { return meet(AT_WARP, ADD, value); }
static Word __reduce_min_sync(Word, Word value) { return meet(AT_WARP, MIN, value); }
static Word __shfl_up_sync(Word, Word value, Word by) { return meet(AT_WARP, UP, value, by); }
static Word __shfl_sync(Word, Word value, Word lane) { return meet(AT_WARP, FROM, value, lane); }
static Word __ballot_sync(Word, bool value) { return meet(AT_WARP, BALLOT, value); }
static bool __any_sync(Word, bool value) { return meet(AT_WARP, BALLOT, value) != 0; }
static Word __syncthreads_count(bool value) { return meet(AT_BLOCK, COUNT, value); }
static void __syncthreads() { meet(AT_BLOCK, COUNT, 0); }
static void __syncwarp() { meet(AT_WARP, BALLOT, 0); }
static void atomicMin(Word* where, Word value) { *where = min(*where, value); }
static float __fdividef(float a, float b) { return a / b; }
static Word __popc(Word value) { return __builtin_popcount(value); }
static int __clz(Word value) { return value ? __builtin_clz(value) : 32; }

#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(threads)
#include "kernel.inc"

static struct {
    const int* seq_lens;
    Word batch, parts, capacity, table, row_stride, each;
    int4* rows;
    int *num_splits, *block_table;
} call;

static void thread_body() {
    auto kernel = call.each == 0 ? schedule_few : call.each == 1 ? schedule_1 : schedule_4;
    kernel(call.seq_lens, call.batch, call.parts, call.rows, call.num_splits, call.capacity, call.table,
           call.block_table, call.row_stride);
    state[threadIdx.x] = ENDED;
    swapcontext(&contexts[threadIdx.x], &scheduler);
}

static void finish_warp(Word base) {
    Word sum = 0, least = ~0u, votes = 0;
    for (Word lane = 0; lane < 32; lane++) {
        sum += given[base + lane];
        least = min(least, given[base + lane]);
        votes |= (given[base + lane] != 0) << lane;
    }
    for (Word lane = 0; lane < 32; lane++) {
        Word up = lane >= argument[base] ? lane - argument[base] : lane;
        Word results[] = {sum, least, given[base + up], given[base + argument[base + lane] % 32], votes};
        taken[base + lane] = results[operation[base]];
        state[base + lane] = RUNNING;
    }
}

// 0: done. 1: lanes of a warp met at different operations. 2: threads wait for others that never come.
extern "C" int run_block(const int* seq_lens, Word batch, Word parts, int4* rows, int* num_splits, Word capacity,
                         Word table, int* block_table, Word row_stride, Word each, Word threads) {
    static char* stacks = (char*)malloc(THREADS * STACK);
    call = {seq_lens, batch, parts, capacity, table, row_stride, each, rows, num_splits, block_table};
    blockDim.x = threads;
    std::fill(shared_words, shared_words + SHARED, 0xdeadbeefu);
    for (Word thread = 0; thread < threads; thread++) {
        getcontext(&contexts[thread]);
        contexts[thread].uc_stack.ss_sp = stacks + thread * STACK;
        contexts[thread].uc_stack.ss_size = STACK;
        makecontext(&contexts[thread], thread_body, 0);
        state[thread] = RUNNING;
    }
    for (;;) {
        for (Word thread = 0; thread < threads; thread++)
            if (state[thread] == RUNNING) {
                threadIdx.x.thread = thread;
                swapcontext(&scheduler, &contexts[thread]);
            }
        bool moved = false;
        for (Word base = 0; base < threads; base += 32) {
            if (std::count(state + base, state + base + 32, AT_WARP) < 32) continue;
            if (std::count(operation + base, operation + base + 32, operation[base]) < 32) return 1;
            finish_warp(base);
            moved = true;
        }
        if (std::count(state, state + threads, AT_BLOCK) == threads) {
            Word count = 0;
            for (Word thread = 0; thread < threads; thread++) count += given[thread];
            std::fill(taken, taken + threads, count);
            std::fill(state, state + threads, RUNNING);
            moved = true;
        }
        if (std::count(state, state + threads, ENDED) == threads) return 0;
        if (!moved) return 2;
    }
}
