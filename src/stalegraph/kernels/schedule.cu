// FlashMLA's FP8 decode schedule in one block: the same rows and num_splits as its one-warp planner, made in parallel.
//
// Lay all requests end to end on one axis, each as long as it costs: its KV blocks plus an overhead of 5. A part that
// begins at s may spend `budget`, so it reaches to t = s + budget; with p the last request start at or before t, the next
// part begins at max(p, t - 5). So from part to part the reach moves on by `stride` = budget - 5, and by up to 5 more where
// a request begins less than 5 before it: t' = t + stride + lost(t). This is the only serial chain there is. It is gone
// through in one of two ways: `walk` for short requests, `leap` for long ones; all else is done by one thread a part or a
// request. `kernels/model.py` says the same in Python.
//
// Names: a position is measured in blocks on that axis; first[r] is where request r begins; a cut is where a part begins.

typedef unsigned int u32;

constexpr u32 ALL = 0xffffffffu;     // all lanes of a warp
constexpr u32 OVERHEAD = 5;          // blocks that starting a request costs
constexpr u32 BEYOND = 0x7fffffffu;  // a position that no part reaches: all requests together cost less than 2^30
constexpr u32 NO_EVENT = 0xffffffffu;
constexpr u32 BLOCK_SIZE = 64;       // tokens per KV block
constexpr u32 MOST_WARPS = 32;
constexpr u32 STEPS = 4;             // of the walk, between two looks at where it is
constexpr u32 JUMP = 4;              // parts that a step of the walk takes where a table for that is worth its making:
constexpr u32 SHORT = 32;            // up to so many positions a thread,
constexpr u32 ABREAST = 4;           // which takes so many at once

struct Plan {
    u32 batch, parts, total, stride;  // total: what all requests cost, in blocks
    const u32* first;                 // batch + 2 positions: [batch] is total, [batch + 1] is BEYOND
};

// The last request that begins at or before `position`: `batch` where position is total.
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

// Writes the reach of every `skip`-th part, one after another, up to the total: a step is one load and one addition.
// table[t] is what is lost over `skip` parts from one that reaches to t on.
__device__ __forceinline__ void walk(const Plan& plan, const unsigned char* table, u32 skip, u32* reaches) {
    u32 reach = plan.stride + OVERHEAD;
    const u32 stride = skip * plan.stride;
    for (u32 part = 0; part < plan.parts && reach < plan.total; part += STEPS * skip) {
#pragma unroll
        for (u32 step = 0; step < STEPS; step++) {
            reaches[part + step * skip] = reach;
            reach += stride + table[reach];
        }
    }
}

// A thread's part: where it reaches to, the last request that begins at or before that, where that begins and ends.
struct Part {
    u32 reach, request, start, end;
};

// Parts as if none lost any blocks, which few do when requests are long; then, for each that does (an event), all parts
// behind it move on by what it loses. `events` are two rows of MOST_WARPS words in shared memory.
__device__ __forceinline__ void leap(const Plan& plan, u32 place, Part& part, u32* events) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (u32 settled = 0, row = 0;; row ^= MOST_WARPS) {  // places below `settled` are final
        u32 left = part.reach - part.start;
        bool mine = left < OVERHEAD && part.reach < plan.total && place >= settled;
        u32 warp_event = __reduce_min_sync(ALL, mine ? place * 8 + OVERHEAD - left : NO_EVENT);
        if (lane == 0) events[row + warp] = warp_event;
        __syncthreads();
        u32 event = __reduce_min_sync(ALL, lane < warps ? events[row + lane] : NO_EVENT);
        if (event == NO_EVENT) break;
        settled = event / 8 + 1;
        part.reach = min(part.reach + (place >= settled ? event % 8 : 0), plan.total);
        bool over = part.reach >= part.end;  // by at most 4 blocks, and no request costs less than 5
        part.start = over ? part.end : part.start;
        part.request += over;
        part.end = plan.first[part.request + 1];
    }
}

// How many of the cuts 1 to `part` fall inside a request, and how many of those in the last one's request. Bit i of
// `inside` says so of cut i + 1; bit i of `leads`, that it is the first cut in its request or before it.
__device__ __forceinline__ void count_cuts(u32 part, const u32* inside, const u32* leads, u32& count, u32& same) {
    count = same = 0;
    bool behind = true;  // no leading cut was met yet
    for (u32 bits = part; bits;) {
        u32 word = (bits - 1) / 32, mask = ALL >> (31 - (bits - 1) % 32);
        u32 cuts = inside[word] & mask, lead = leads[word] & mask;
        count += __popc(cuts);
        if (behind) same += __popc(lead ? cuts & ALL << (31 - __clz(lead)) : cuts);
        behind &= !lead;
        bits = word * 32;
    }
}

// An empty request makes the attention kernel load the page that is listed before its row (vLLM #33664).
__device__ __forceinline__ void make_safe(int* block_table, unsigned long long request, u32 row_stride) {
    if (request && block_table[request * row_stride - 1] < 0) block_table[request * row_stride - 1] = 0;
}

// Shared memory: `table` bytes, a multiple of 32, for `lost` and, in their second half, `jumps`; then words: parts + 1
// requests of cuts, parts + 1 + STEPS * JUMP blocks of cuts, batch + 2 starts, batch lengths.
// One block of blockDim.x threads, a multiple of 32, with blockDim.x * EACH >= batch.
template <int EACH>
__device__ __forceinline__ void schedule(const int* seq_lens, u32 batch, u32 parts, int4* rows, int* num_splits,
                                         u32 capacity, u32 table, int* block_table, u32 row_stride) {
    extern __shared__ int4 shared[];
    __shared__ u32 warp_words[2 * MOST_WARPS], inside[MOST_WARPS], leads[MOST_WARPS], resume;
    unsigned char* lost = (unsigned char*)shared;
    unsigned char* jumps = lost + table / 2;
    u32* cut_request = (u32*)(lost + table);
    u32* cut_block = cut_request + parts + 1;
    u32* first = cut_block + parts + 1 + STEPS * JUMP;
    u32* length = first + batch + 2;
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;

    // Where each request begins: a prefix sum over the block. Tables are cleared while the lengths are on their way.
    u32 cost[EACH], mine = 0;
#pragma unroll
    for (int k = 0; k < EACH; k++) cost[k] = thread * EACH + k < batch ? max(seq_lens[thread * EACH + k], 0) : 0;
    for (u32 word = thread; word < table / 16; word += blockDim.x) shared[word] = make_int4(0, 0, 0, 0);
    for (u32 part = thread; part < parts + 1; part += blockDim.x) cut_block[part + 1] = BEYOND;  // not walked to
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        if (thread * EACH + k < batch) {
            length[thread * EACH + k] = cost[k];
            if (block_table && cost[k] == 0) make_safe(block_table, thread * EACH + k, row_stride);
            cost[k] = (cost[k] + BLOCK_SIZE - 1) / BLOCK_SIZE + OVERHEAD;
        }
        mine += cost[k];
    }
    u32 position = mine;
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) {
        u32 other = __shfl_up_sync(ALL, position, distance);
        if (lane >= distance) position += other;
    }
    if (lane == 31) warp_words[warp] = position;
    __syncthreads();
    u32 other_warp = lane < blockDim.x / 32 ? warp_words[lane] : 0;
    const u32 total = __reduce_add_sync(ALL, other_warp);
    position += __reduce_add_sync(ALL, lane < warp ? other_warp : 0) - mine;
    const Plan plan = {batch, parts, total, (total + parts - 1) / parts, first};
    const u32 budget = plan.stride + OVERHEAD;
    const u32 seen = total + STEPS * JUMP * budget;  // a walk looks that far, behind the total
    const bool tabled = seen < table, jump = seen < table / 2 && total <= SHORT * blockDim.x;
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        if (thread * EACH + k < batch) {
            first[thread * EACH + k] = position;
            if (tabled)
                for (u32 left = 0; left < OVERHEAD; left++) lost[position + left] = OVERHEAD - left;
        }
        position += cost[k];
    }
    if (thread == 0) {
        first[batch] = total;
        first[batch + 1] = BEYOND;
        cut_request[0] = cut_block[0] = 0;
    }
    __syncthreads();

    // The serial chain, where it is walked. Reaches go where the cuts' blocks will be.
    if (jump) {
        for (u32 from = thread; from <= total; from += ABREAST * blockDim.x) {
            u32 to[ABREAST];
#pragma unroll
            for (u32 k = 0; k < ABREAST; k++) to[k] = min(from + k * blockDim.x, total);
            for (u32 step = 0; step < JUMP; step++)
#pragma unroll
                for (u32 k = 0; k < ABREAST; k++) to[k] += plan.stride + lost[to[k]];
#pragma unroll
            for (u32 k = 0; k < ABREAST; k++) {
                u32 here = from + k * blockDim.x;
                if (here <= total) jumps[here] = to[k] - here - JUMP * plan.stride;
            }
        }
        __syncthreads();
    }
    if (tabled) {
        if (warp == 0) walk(plan, jump ? jumps : lost, jump ? JUMP : 1, cut_block + 1);
        __syncthreads();
    }

    // Where each part ends, which is where the next begins: a thread a part.
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
        if (!tabled) leap(plan, place, part, warp_words);
        if (jump) __syncthreads();  // all reaches are read
        u32 left = part.reach - part.start;
        u32 word_inside = __ballot_sync(ALL, left > OVERHEAD);
        u32 word_leads = __ballot_sync(ALL, part.start + budget > part.reach);
        if (base + thread < parts) {
            cut_request[base + thread + 1] = part.request;
            cut_block[base + thread + 1] = max(left, OVERHEAD) - OVERHEAD;
            inside[(base + thread) / 32] = word_inside;
            leads[(base + thread) / 32] = word_leads;
        }
        if (thread == blockDim.x - 1) resume = part.reach - min(left, OVERHEAD);
        __syncthreads();
    }

    // A row a part, and the sums of the requests that end in it: a request has one split more than cuts inside it.
    const u32 shift = max(__clz(parts - 1) - __clz(blockDim.x) - 1, 0);  // 2^shift threads share a part
    for (u32 item = thread; item < parts << shift; item += blockDim.x) {
        u32 part = item >> shift, share = item - (part << shift), count, same;
        u32 request = cut_request[part], block = cut_block[part];
        u32 end_request = cut_request[part + 1], end_block = cut_block[part + 1];
        count_cuts(part, inside, leads, count, same);
        for (u32 ended = request + 1 + share; ended <= end_request; ended += 1 << shift) num_splits[ended] = ended + count;
        if (share == 0) {
            rows[2 * part] = make_int4(request, block * BLOCK_SIZE, end_block ? end_request : end_request - 1,
                                       end_block ? end_block * BLOCK_SIZE : length[end_request - 1]);
            rows[2 * part + 1] = make_int4(same, 0, 0, 0);  // three columns are unused
        }
    }
    if (thread == 0) num_splits[0] = 0;
    if (batch + 1 + thread < capacity) {  // entries behind the batch repeat the last sum
        u32 count, same;
        count_cuts(parts - 1, inside, leads, count, same);
        for (u32 behind = batch + 1 + thread; behind < capacity; behind += blockDim.x) num_splits[behind] = batch + count;
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
