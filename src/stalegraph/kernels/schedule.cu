// FlashMLA's FP8 decode schedule in one block: the same rows and num_splits as its one-warp planner, made in parallel.
//
// Lay all requests end to end on one axis, each as long as it costs: its KV blocks plus an overhead of 5. A part that
// begins at s may spend `budget`, so it reaches to t = s + budget; with p the last request start at or before t, the
// next part begins at max(p, t - 5). So from part to part the reach moves on by `stride` = budget - 5, and by up to 5
// more where a request begins less than 5 before it: t' = t + stride + lost(t). This is the only serial chain there is.
// It is gone through in one of three ways: from request to request where those are few, `walk` for more of them that
// are short, `leap` for long ones; all else, by one thread a part or a request. The same in Python: kernels/model.py.
//
// Names: positions are in blocks on that axis; first[r] is where request r begins; a cut is where a part begins.

typedef unsigned int u32;

constexpr u32 ALL = 0xffffffffu;     // all lanes of a warp
constexpr u32 OVERHEAD = 5;          // blocks that starting a request costs
constexpr u32 BEYOND = 0x7fffffffu;  // a position that no part reaches: all requests together cost less than 2^30
constexpr u32 NO_EVENT = 0xffffffffu;
constexpr u32 BLOCK_SIZE = 64;       // tokens per KV block
constexpr u32 MOST_WARPS = 32;       // of a block; also the most words of 32 parts
constexpr u32 EVENT_SLOTS = 3;       // one in use, one that some still read, one that is being cleared
constexpr u32 STEPS = 4;             // of the walk, between two looks at where it is
constexpr u32 JUMP = 4;              // parts that a step of the walk takes where a table for that is worth its making:
constexpr u32 SHORT = 12288;         // up to so many positions,
constexpr u32 ABREAST = 4;           // of which a thread takes so many at once

struct Plan {
    u32 batch, parts, total, stride;  // total: what all requests cost, in blocks
    const u32* first;                 // batch + 2 positions: [batch] is total, [batch + 1] is BEYOND
};

// The last request that begins at or before `position`: `batch` where that is the total.
__device__ __forceinline__ u32 request_at(const Plan& plan, u32 position) {
    u32 found = 0;
    for (u32 step = 1u << (31 - __clz(plan.batch)) / 2 * 2; step; step /= 4) {  // three loads at once, half as often
        u32 one = found + step, two = one + step, three = two + step;
        u32 at_one = plan.first[min(one, plan.batch + 1)], at_two = plan.first[min(two, plan.batch + 1)];
        u32 at_three = plan.first[min(three, plan.batch + 1)];
        found = at_three <= position ? three : at_two <= position ? two : at_one <= position ? one : found;
    }
    return found;
}

// The reach of every part, one after another, for short requests: a step is one load and one addition. lost[t] is what
// a part loses that reaches to t. Given room for `jumps`, what JUMP parts lose together, a step takes so many parts and
// those between are left out. Not inlined, so that the code of the others lies in one piece: it is fetched as it runs.
__device__ __noinline__ void walk(u32 parts, u32 total, u32 stride, const unsigned char* lost, unsigned char* jumps,
                                  u32* reaches) {
    if (jumps) {
        for (u32 from = threadIdx.x; from <= total; from += ABREAST * blockDim.x) {
            u32 to[ABREAST];
#pragma unroll
            for (u32 k = 0; k < ABREAST; k++) to[k] = min(from + k * blockDim.x, total);
#pragma unroll 1
            for (u32 step = 0; step < JUMP; step++)
#pragma unroll
                for (u32 k = 0; k < ABREAST; k++) to[k] += stride + lost[to[k]];
#pragma unroll
            for (u32 k = 0; k < ABREAST; k++) {
                u32 here = from + k * blockDim.x;
                if (here <= total) jumps[here] = to[k] - here - JUMP * stride;
            }
        }
        __syncthreads();
    }
    if (threadIdx.x < 32) {
        const unsigned char* table = jumps ? jumps : lost;
        const u32 skip = jumps ? JUMP : 1;
        u32 reach = stride + OVERHEAD;
        for (u32 part = 0; part < parts && reach < total; part += STEPS * skip) {
#pragma unroll
            for (u32 step = 0; step < STEPS; step++) {
                reaches[part + step * skip] = reach;
                reach += skip * stride + table[reach];
            }
        }
    }
    __syncthreads();
}

// A thread's part: where it reaches to, the last request that begins at or before that, where that begins and ends.
struct Part {
    u32 reach, request, start, end;
};

// Parts as if none lost any blocks, which few do when requests are long; then, for each that does (an event), all parts
// behind it move on by what it loses. `events` are slots in shared memory that take turns.
__device__ __forceinline__ void leap(const Plan& plan, u32 place, Part& part, u32* events, u32& turn) {
    for (u32 settled = 0;;) {  // places below are final
        u32* slot = events + turn;
        turn = turn == EVENT_SLOTS - 1 ? 0 : turn + 1;
        if (threadIdx.x == 0) events[turn] = NO_EVENT;
        u32 left = part.reach - part.start;
        bool event = left < OVERHEAD && part.reach < plan.total && place >= settled;
        if (event) atomicMin(slot, place * 8 + OVERHEAD - left);
        __syncthreads();
        u32 earliest = *slot;
        if (earliest == NO_EVENT) break;
        settled = earliest / 8 + 1;
        part.reach = min(part.reach + (place >= settled ? earliest % 8 : 0), plan.total);
        bool over = part.reach >= part.end;  // by at most 4 blocks, and no request costs less than 5
        part.start = over ? part.end : part.start;
        part.request += over;
        part.end = plan.first[part.request + 1];
    }
}

// 32 cuts: bit i of the n-th, counted from 0, speaks of cut 32 n + i + 1.
struct Cuts {
    u32 inside;  // it falls inside a request, not before it
    u32 leads;   // it is the first in its request, or before it
};

// How many of the cuts 1 to `part` fall inside a request, and how many of those in the last one's request. All parts of
// a warp are of one word.
__device__ __forceinline__ void count_cuts(u32 part, u32 lane, const Cuts* cuts, u32& count, u32& same) {
    const u32 word = part / 32, earlier = ~(ALL << part % 32);  // earlier: bits of the part's own word
    Cuts of_lane = {0, 0};
    if (lane < word) of_lane = cuts[lane];
    u32 inside = cuts[word].inside & earlier, leads = cuts[word].leads & earlier;
    int leader = 31 - __clz(__ballot_sync(ALL, of_lane.leads != 0));  // the last word with a leading cut, or -1
    u32 since_leader = (int)lane < leader ? 0 : of_lane.inside;
    if ((int)lane == leader) since_leader &= ALL << (31 - __clz(of_lane.leads));
    u32 before = __reduce_add_sync(ALL, __popc(of_lane.inside)), carried = __reduce_add_sync(ALL, __popc(since_leader));
    count = before + __popc(inside);
    same = leads ? __popc(inside & ALL << (31 - __clz(leads))) : carried + __popc(inside);
}

// An empty request makes the attention kernel load the page that is listed before its row (vLLM #33664).
__device__ __forceinline__ void make_safe(int* block_table, unsigned long long request, u32 row_stride) {
    if (request && block_table[request * row_stride - 1] < 0) block_table[request * row_stride - 1] = 0;
}

// The sum over the lanes up to this one.
__device__ __forceinline__ u32 sum_to_lane(u32 value) {
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) {
        u32 other = __shfl_up_sync(ALL, value, distance);
        if (threadIdx.x % 32 >= distance) value += other;
    }
    return value;
}

// Shared memory: `table` bytes, a multiple of 16, for `lost` and, behind it, `jumps`; then words: parts + 1 requests of
// cuts, parts + 1 + STEPS * JUMP blocks of cuts, batch + 2 starts, batch lengths.
// One block of blockDim.x threads, a multiple of 32, with blockDim.x * EACH >= batch.
template <int EACH>
__device__ __forceinline__ void schedule(const int* seq_lens, u32 batch, u32 parts, int4* rows, int* num_splits,
                                         u32 capacity, u32 table, int* block_table, u32 row_stride) {
    extern __shared__ int4 shared[];
    __shared__ u32 warp_costs[MOST_WARPS], events[EVENT_SLOTS], resume;
    __shared__ Cuts cuts[MOST_WARPS + 1];
    unsigned char* lost = (unsigned char*)shared;
    u32* cut_request = (u32*)(lost + table);
    u32* cut_block = cut_request + parts + 1;
    u32* first = cut_block + parts + 1 + STEPS * JUMP;
    u32* length = first + batch + 2;
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;

    // Where each request begins: a prefix sum over the block.
    const u32 own = EACH * thread;  // this thread's first request
    u32 cost[EACH], mine = 0;
#pragma unroll
    for (int k = 0; k < EACH; k++) cost[k] = own + k < batch ? max(seq_lens[own + k], 0) : 0;
    if (thread == 0) {
        first[batch + 1] = BEYOND;
        cut_request[0] = cut_block[0] = 0;
        events[0] = NO_EVENT;
    }
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        if (own + k < batch) {
            length[own + k] = cost[k];
            if (block_table && cost[k] == 0) make_safe(block_table, own + k, row_stride);
            cost[k] = (cost[k] + BLOCK_SIZE - 1) / BLOCK_SIZE + OVERHEAD;
        }
        mine += cost[k];
    }
    u32 position = sum_to_lane(mine);
    if (lane == 31) warp_costs[warp] = position;
    position -= mine;
    __syncthreads();
    u32 other_warp = lane < blockDim.x / 32 ? warp_costs[lane] : 0;
    const u32 total = __reduce_add_sync(ALL, other_warp);
    position += __reduce_add_sync(ALL, lane < warp ? other_warp : 0);
    const Plan plan = {batch, parts, total, (total + parts - 1) / parts, first};
    const u32 budget = plan.stride + OVERHEAD;
    const u32 seen = (total + STEPS * JUMP * budget) / 16 + 1;  // 16 positions each: a walk looks behind the total
    const bool tabled = seen <= table / 16, jump = 2 * seen <= table / 16 && total <= SHORT;
    unsigned char* jumps = lost + 16 * seen;
    if (tabled) {
        const u32 cleared = jump ? 2 * seen : seen;
        for (u32 word = thread; word < cleared; word += blockDim.x) shared[word] = make_int4(0, 0, 0, 0);
        for (u32 part = thread; part < parts + 1; part += blockDim.x) cut_block[part + 1] = BEYOND;  // not walked to
        __syncthreads();
    }
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        if (own + k < batch) {
            first[own + k] = position;
            if (tabled)
                for (u32 left = 0; left < OVERHEAD; left++) lost[position + left] = OVERHEAD - left;
        }
        position += cost[k];
    }
    if (thread == 0) first[batch] = total;
    __syncthreads();

    // The serial chain, where it is walked. Reaches go where the cuts' blocks will be.
    if (tabled) walk(parts, total, plan.stride, lost, jump ? jumps : nullptr, cut_block + 1);

    // Where each part ends, which is where the next begins: a thread a part.
    u32 turn = 0;
    for (u32 base = 0; base < parts; base += blockDim.x) {
        u32 place = min(thread, parts - base);  // threads behind the last part follow it, which keeps sums below 2^32
        u32 since = jump ? (base + place) % JUMP : 0;
        Part part;
        if (tabled) {
            part.reach = min(cut_block[base + place - since + 1], total);
            for (; since; since--) part.reach = min(part.reach + plan.stride + lost[part.reach], total);
        } else {
            part.reach = min((base ? resume : 0) + place * plan.stride + budget, total);
        }
        part.request = request_at(plan, part.reach);
        part.start = first[part.request];
        part.end = first[part.request + 1];
        if (!tabled) leap(plan, place, part, events, turn);
        if (jump) __syncthreads();  // all reaches are read
        u32 left = part.reach - part.start;
        u32 inside = __ballot_sync(ALL, left > OVERHEAD);
        u32 leads = __ballot_sync(ALL, part.start + budget > part.reach);
        if (base + thread < parts) {
            cut_request[base + thread + 1] = part.request;
            cut_block[base + thread + 1] = max(left, OVERHEAD) - OVERHEAD;
            cuts[(base + thread) / 32] = {inside, leads};
        }
        if (thread == blockDim.x - 1) resume = part.reach - min(left, OVERHEAD);
        __syncthreads();
    }

    // A row a part, and the sums of the requests that end in it: a request has one split more than cuts inside it.
    const u32 shift = max(__clz(parts - 1) - __clz(blockDim.x) - 1, 0);  // 2^shift threads share a part
    u32* sums = first;
    if (thread == 0) sums[0] = 0;
    for (u32 item = thread; item - lane < parts << shift; item += blockDim.x) {
        u32 part = item >> shift, share = item - (part << shift), count, same;
        count_cuts(part, lane, cuts, count, same);
        if (part >= parts) break;
        u32 request = cut_request[part], block = cut_block[part];
        u32 end_request = cut_request[part + 1], end_block = cut_block[part + 1];
        for (u32 ended = request + 1 + share; ended <= end_request; ended += 1 << shift) sums[ended] = ended + count;
        if (share == 0) {
            rows[2 * part] = make_int4(request, block * BLOCK_SIZE, end_block ? end_request : end_request - 1,
                                       end_block ? end_block * BLOCK_SIZE : length[end_request - 1]);
            rows[2 * part + 1] = make_int4(same, 0, 0, 0);  // three columns are unused
        }
    }
    __syncthreads();
    // Entries behind the batch repeat the last sum.
    for (u32 entry = thread; entry < capacity; entry += blockDim.x) num_splits[entry] = sums[min(entry, batch)];
}

// Few requests, at most 32, a lane each, in every warp alike; a thread a part. Nothing is shared and nobody waits.
// The chain goes from request to request: which part is the first to reach to where a request ends, and how much
// `further` it reaches. That follows from what it would be with nothing lost and from what was lost by then, which
// moves on within a stride only. Parts then look up the last request whose end they reach to.
extern "C" __global__ void __launch_bounds__(1024)
schedule_few(const int* seq_lens, u32 batch, u32 parts, int4* rows, int* num_splits, u32 capacity, u32 table,
             int* block_table, u32 row_stride) {
    const int lane = threadIdx.x % 32, part = threadIdx.x, requests = batch, overhead = OVERHEAD;
    const int length = lane < requests ? max(seq_lens[lane], 0) : 0;
    if (block_table && part < requests && length == 0) make_safe(block_table, part, row_stride);
    const int end = sum_to_lane(lane < requests ? (length + BLOCK_SIZE - 1) / BLOCK_SIZE + OVERHEAD : 0);
    const int total = __shfl_sync(ALL, end, 31), stride = (total + parts - 1) / parts, budget = stride + overhead;

    int away = end - budget;                        // from what the first part reaches to
    int first = (int)__fdividef(away, stride);      // exact but for one, in either direction
    int further = first * stride - away;
    if (further < 0) first++, further += stride;
    if (further < 0) first++, further += stride;
    if (further >= stride) first--, further -= stride;
    if (away <= 0) first = 0, further = -away;
    if (lane >= requests) first = BEYOND;
    int lost = 0, turns = 0, least = 0;  // lost so far, less `turns` strides; the first part that can be next
    const auto take = [&](int request) {
        int its = __shfl_sync(ALL, first, request) - turns, ahead = __shfl_sync(ALL, further, request) + lost;
        if (ahead >= stride) its--, ahead -= stride;
        if (its < least) its++, ahead += stride;
        if (lane == request) first = its, further = ahead;
        least = its + (ahead < overhead);
        lost += max(overhead - ahead, 0);
        if (lost >= stride) lost -= stride, turns++;
    };
    if (stride >= overhead) {  // no request loses more than one stride
#pragma unroll 4
        for (int request = 0; request < requests; request++) take(request);
    } else {
        for (int request = 0; request < requests; request++) {
            take(request);
            while (lost >= stride) lost -= stride, turns++;
        }
    }

    // A request has one split more than parts that end inside it, which are those from `inside` on to before `first`.
    const int inside = first + (further <= overhead);
    int earlier = __shfl_up_sync(ALL, inside, 1);
    const int splits = lane < requests ? max(first - (lane ? earlier : 0), 0) + 1 : 0;
    const int sum = sum_to_lane(splits), all = __shfl_sync(ALL, sum, 31);
    for (int entry = part; entry < (int)capacity; entry += blockDim.x)
        num_splits[entry] = entry < requests ? sum - splits : all;

    // Where this part begins, which is where the one before it ends, and where it ends.
    int request[2] = {0, 0}, block[2];
    for (int step = 1 << (31 - __clz(batch)); step; step /= 2)
#pragma unroll
        for (int side = 0; side < 2; side++) {
            int last = request[side] + step - 1, its = __shfl_sync(ALL, first, last & 31);
            if (last < requests && its < part + side) request[side] += step;
        }
#pragma unroll
    for (int side = 0; side < 2; side++) {
        int before = request[side] - 1, its = __shfl_sync(ALL, first, before & 31);
        int ahead = __shfl_sync(ALL, further, before & 31);
        if (before < 0) its = 0, ahead = budget;
        block[side] = max(ahead - overhead, 0) + (part + side - 1 - its) * stride;
        if (request[side] == requests) block[side] = 0;
    }
    int from_inside = __shfl_sync(ALL, inside, (request[0] - 1) & 31);
    int last_length = __shfl_sync(ALL, length, (request[1] - 1) & 31);
    if (part < (int)parts) {
        rows[2 * part] = make_int4(request[0], block[0] * BLOCK_SIZE, block[1] ? request[1] : request[1] - 1,
                                   block[1] ? block[1] * BLOCK_SIZE : last_length);
        rows[2 * part + 1] = make_int4(block[0] ? part - (request[0] ? from_inside : 0) : 0, 0, 0, 0);
    }
}

extern "C" __global__ void __launch_bounds__(1024)
schedule_1(const int* seq_lens, u32 batch, u32 parts, int4* rows, int* num_splits, u32 capacity, u32 table,
           int* block_table, u32 row_stride) {
    schedule<1>(seq_lens, batch, parts, rows, num_splits, capacity, table, block_table, row_stride);
}

extern "C" __global__ void __launch_bounds__(1024)
schedule_4(const int* seq_lens, u32 batch, u32 parts, int4* rows, int* num_splits, u32 capacity, u32 table,
           int* block_table, u32 row_stride) {
    schedule<4>(seq_lens, batch, parts, rows, num_splits, capacity, table, block_table, row_stride);
}
