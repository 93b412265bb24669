// FlashMLA's FP8 decode schedule in one block: the same rows and num_splits as its one-warp planner, made in parallel.
//
// Lay all requests end to end on one axis, each as long as it costs: its KV blocks plus an overhead of 5. A part that
// begins at s may spend `budget`, so it reaches to t = s + budget; with p the last request start at or before t, the next
// part begins at max(p, t - 5), that is at t - min(t - p, 5). This is the only serial chain there is. The rest is a prefix
// sum before it and a look-up per part and per request after it. `kernels/model.py` says the same in Python.
//
// Names: a position is measured in blocks on that axis; first[r] is where request r begins; a cut is where a part begins.

typedef unsigned int u32;

constexpr u32 ALL = 0xffffffffu;      // all lanes of a warp
constexpr u32 OVERHEAD = 5;           // blocks that starting a request costs
constexpr u32 BEYOND = 0x7fffffffu;   // a position that no part reaches: all requests together cost less than 2^30
constexpr u32 NO_EVENT = 0xffffffffu;
constexpr int BLOCK_SIZE = 64;        // tokens per KV block
constexpr int CATCH_UP = 4;           // advances by single requests before searching anew
constexpr u32 WALK_COST = 1, LEAP_COST = 2;  // of a part in walk, of an event in leap, measured on an H200

struct Cut {
    u32 request_and_count;  // the request in which the part begins, and << 16 how many cuts so far fall inside a request
    u32 block;              // where in that request it begins, in blocks; 0: the cut falls before the request
};

struct Plan {
    u32 batch, parts, total, budget;  // total: what all requests cost; budget: what a part may spend; both in blocks
    const u32* first;                 // batch + 2 positions: [batch] is total, [batch + 1] is BEYOND
    Cut* cut;                         // parts + 1: where part i begins; [parts] is the end of the last one
};

// The last request that begins at or before `position`: `batch` where position is total.
__device__ __forceinline__ u32 request_at(const Plan& plan, u32 position) {
    u32 found = 0;
    for (u32 bit = 1u << (31 - __clz(plan.batch)); bit; bit >>= 1)
        if (found + bit <= plan.batch && plan.first[found + bit] <= position) found += bit;
    return found;
}

// One part after another, for short requests. A warp holds a window of 64 request starts in its registers, so that a step
// of the chain is a subtraction, a warp-wide minimum and another subtraction, with no load in it.
__device__ __forceinline__ void walk(const Plan& plan, u32 lane) {
    const u32 last = plan.batch + 1;
    u32 request = lane, at = 0, count = 0;  // request: whose start is in `low`; that of request + 32 is in `high`
    u32 low = plan.first[min(lane, last)], high = plan.first[min(lane + 32, last)];
    u32 next_low = plan.first[min(lane + 64, last)], next_high = plan.first[min(lane + 96, last)];
    u32 edge = __shfl_sync(ALL, next_low, 0);
    Cut* cut = plan.cut;
    Cut* end = cut + plan.parts;
    do {
        u32 reach = min(at + plan.budget, plan.total);
        u32 below, left;
        bool upper;
        for (;;) {
            u32 below_low = reach - low, below_high = reach - high;  // wraps to 2^31 or more for starts behind reach
            upper = below_high < below_low;
            below = min(below_low, below_high);
            left = __reduce_min_sync(ALL, below);
            if (reach < edge) break;
            request += 64;  // the window slides; it was not far enough
            low = next_low;
            high = next_high;
            next_low = plan.first[min(request + 64, last)];
            next_high = plan.first[min(request + 96, last)];
            edge = __shfl_sync(ALL, next_low, 0);
        }
        count += left > OVERHEAD ? 1 << 16 : 0;
        at = reach - min(left, OVERHEAD);
        Cut here = {(request + (upper ? 32 : 0)) | count, max(left, OVERHEAD) - OVERHEAD};
        cut++;
        if (below == left) *cut = here;  // starts differ, so this is one lane
    } while (cut != end);
}

// 32 parts at a time, for long requests. As long as no request begins within the last 5 blocks of a part's reach, each
// part begins budget - 5 behind the one before; each time one does, all later parts move on by the few blocks that are lost.
// cut[i + 1] comes in holding the request that part i would reach were nothing ever lost.
__device__ __forceinline__ void leap(const Plan& plan, u32 lane) {
    u32 at = 0, count = 0;
    for (u32 base = 0; base < plan.parts; base += 32) {
        u32 here = min(lane, plan.parts - base);  // lanes behind the last part follow it, which keeps sums below 2^32
        u32 reach = min(at + here * (plan.budget - OVERHEAD) + plan.budget, plan.total);
        u32 request = plan.cut[min(base + lane, plan.parts - 1) + 1].request_and_count;
        u32 start = plan.first[request], end = plan.first[request + 1];
        for (int tries = 0; __any_sync(ALL, reach >= end); tries++) {
            if (reach >= end) {
                request = tries < CATCH_UP ? request + 1 : request_at(plan, reach);
                start = plan.first[request];
                end = plan.first[request + 1];
            }
        }
        for (u32 settled = 0; settled < 32;) {  // lanes below `settled` are final
            u32 left = reach - start;
            bool event = left < OVERHEAD && reach < plan.total && lane >= settled;
            u32 first_event = __reduce_min_sync(ALL, event ? lane << 3 | (OVERHEAD - left) : NO_EVENT);
            if (first_event == NO_EVENT) break;
            settled = (first_event >> 3) + 1;
            reach = min(reach + (lane >= settled ? first_event & 7 : 0), plan.total);
            bool over = reach >= end;  // by at most 4 blocks, and no request costs less than 5
            start = over ? end : start;
            request += over;
            end = plan.first[request + 1];
        }
        u32 left = reach - start;
        u32 inside = __ballot_sync(ALL, left > OVERHEAD && base + lane < plan.parts);
        u32 so_far = count + __popc(inside & (ALL >> (31 - lane)));
        if (base + lane < plan.parts)
            plan.cut[base + lane + 1] = {request | so_far << 16, max(left, OVERHEAD) - OVERHEAD};
        count += __popc(inside);
        at = __shfl_sync(ALL, reach - min(left, OVERHEAD), 31);
    }
}

// How many cuts fall inside requests before `request`.
__device__ __forceinline__ u32 cuts_before(const Plan& plan, u32 request) {
    u32 found = 0;
    for (u32 bit = 1u << (31 - __clz(plan.parts)); bit; bit >>= 1)
        if (found + bit <= plan.parts && plan.cut[found + bit - 1].request_and_count % (1 << 16) < request) found += bit;
    return found ? plan.cut[found - 1].request_and_count >> 16 : 0;
}

// Shared memory, in 4-byte words: 2 * (parts + 1) for cuts, batch + 2 starts, batch lengths.
// One block of blockDim.x threads, a multiple of 32, with blockDim.x * EACH >= batch.
template <int EACH>
__device__ __forceinline__ void schedule(const int* seq_lens, u32 batch, u32 parts, int4* rows, int* num_splits,
                                         u32 capacity) {
    extern __shared__ Cut shared[];
    __shared__ u32 warp_costs[32];
    u32* first = (u32*)(shared + parts + 1);
    u32* length = first + batch + 2;
    Plan plan = {batch, parts, 0, 0, first, shared};
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;

    // Where each request begins: a prefix sum over the block.
    u32 cost[EACH], mine = 0;
    for (int k = 0; k < EACH; k++) {
        u32 request = thread * EACH + k;
        cost[k] = 0;
        if (request < batch) {
            u32 tokens = max(seq_lens[request], 0);
            length[request] = tokens;
            cost[k] = (tokens + BLOCK_SIZE - 1) / BLOCK_SIZE + OVERHEAD;
        }
        mine += cost[k];
    }
    u32 warp_cost = __reduce_add_sync(ALL, mine);
    if (lane == 0) warp_costs[warp] = warp_cost;
    u32 position = mine;
    for (u32 distance = 1; distance < 32; distance *= 2) {
        u32 other = __shfl_up_sync(ALL, position, distance);
        if (lane >= distance) position += other;
    }
    __syncthreads();
    u32 other_warp = lane < blockDim.x / 32 ? warp_costs[lane] : 0;
    plan.total = __reduce_add_sync(ALL, other_warp);
    plan.budget = (plan.total + parts - 1) / parts + OVERHEAD;
    position += __reduce_add_sync(ALL, lane < warp ? other_warp : 0) - mine;
    for (int k = 0; k < EACH; k++) {
        if (thread * EACH + k < batch) first[thread * EACH + k] = position;
        position += cost[k];
    }
    if (thread == 0) {
        first[batch] = plan.total;
        first[batch + 1] = BEYOND;
        plan.cut[0] = {0, 0};
    }
    __syncthreads();

    // Where each part begins: by leaps if few parts lose blocks, step by step if many do.
    u32 events = 0;
    for (u32 base = 0; base < parts; base += blockDim.x) {
        bool event = false;
        if (base + thread < parts) {
            u32 reach = min((base + thread) * (plan.budget - OVERHEAD) + plan.budget, plan.total);
            u32 request = request_at(plan, reach);
            plan.cut[base + thread + 1].request_and_count = request;
            event = reach < plan.total && reach - first[request] < OVERHEAD;
        }
        events += __syncthreads_count(event);
    }
    if (warp == 0) {
        if (events * LEAP_COST < parts * WALK_COST)
            leap(plan, lane);
        else
            walk(plan, lane);
    }
    __syncthreads();

    // The rows, one thread a part. The last three columns are unused; they become 0.
    for (u32 part = thread; part < parts; part += blockDim.x) {
        Cut begin = plan.cut[part], end = plan.cut[part + 1];
        u32 request = begin.request_and_count % (1 << 16), end_request = end.request_and_count % (1 << 16);
        u32 split = (begin.request_and_count >> 16) - cuts_before(plan, request);
        rows[2 * part] = make_int4(request, begin.block * BLOCK_SIZE, end.block ? end_request : end_request - 1,
                                   end.block ? end.block * BLOCK_SIZE : length[end_request - 1]);
        rows[2 * part + 1] = make_int4(split, 0, 0, 0);
    }
    // A request has one split more than cuts inside it; entries behind the batch repeat the last sum.
    u32 last = batch + (plan.cut[parts].request_and_count >> 16);
    for (u32 request = thread; request < capacity; request += blockDim.x)
        num_splits[request] = request < batch ? request + cuts_before(plan, request) : last;
}

extern "C" __global__ void __launch_bounds__(1024)
schedule_1(const int* seq_lens, u32 batch, u32 parts, int4* rows, int* num_splits, u32 capacity) {
    schedule<1>(seq_lens, batch, parts, rows, num_splits, capacity);
}

extern "C" __global__ void __launch_bounds__(1024)
schedule_4(const int* seq_lens, u32 batch, u32 parts, int4* rows, int* num_splits, u32 capacity) {
    schedule<4>(seq_lens, batch, parts, rows, num_splits, capacity);
}
