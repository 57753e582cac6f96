// Cumulative operations along lines: one block takes a line, or a chunk of one with what the chunks before it come to.

struct Add { template <class W> static DEVICE W of(W a, W b) { return add(a, b); } };
struct Mul { template <class W> static DEVICE W of(W a, W b) { return mul(a, b); } };
struct Larger { template <class W> static DEVICE W of(W a, W b) { return larger(a, b); } };
struct Smaller { template <class W> static DEVICE W of(W a, W b) { return smaller(a, b); } };

constexpr int BLOCK = 256, EACH = 4, WARPS = BLOCK / 32;

// The element of the lane that is `by` lanes below.
template <class W> DEVICE W below(W x, int by) {
  if constexpr (sizeof(W) == 8) {
    const u64 got = __shfl_up_sync(~0u, *(const u64*)&x, by);
    return *(const W*)&got;
  } else if constexpr (sizeof(W) == 4) {
    const u32 got = __shfl_up_sync(~0u, *(const u32*)&x, by);
    return *(const W*)&got;
  } else {
    return (W)__shfl_up_sync(~0u, (int)x, by);
  }
}

// A line of x, which is [before, length, behind]; block b takes chunk b % chunks of line b / chunks.
struct Line { i64 length, behind, chunk, chunks; };

// What a block has of its tile: the prefix before the thread's own elements, and what the whole tile comes to.
template <class Op, class W> DEVICE void across(W total, W neutral, W& prefix, W& all) {
  __shared__ u64 space[WARPS];
  W* sums = (W*)space;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  W sum = total;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const W other = below(sum, by);
    if (lane >= by) sum = Op::of(other, sum);
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  const W left = below(sum, 1);
  prefix = neutral, all = neutral;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    if (w == warp) prefix = all;
    all = Op::of(all, sums[w]);
  }
  if (lane) prefix = Op::of(prefix, left);
  __syncthreads();
}

template <class T, class Op> DEVICE void scan(const T* x, T* y, const typename Wide<T>::type* carries, const Line& l, u64 bits, i64 is_exclusive) {
  typedef typename Wide<T>::type W;
  const i64 line = blockIdx.x / l.chunks, number = blockIdx.x - line * l.chunks, before = line / l.behind;
  const i64 base = before * l.length * l.behind + (line - before * l.behind);
  const i64 begin = number * l.chunk, end = min(l.length, begin + l.chunk);
  const T nothing = *(const T*)&bits;
  const W neutral = widen(nothing);
  W carry = carries ? carries[blockIdx.x] : neutral;
  for (i64 tile = begin; tile < end; tile += BLOCK * EACH) {
    const i64 first = tile + threadIdx.x * EACH;
    W v[EACH], total = neutral, prefix, all;
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
      v[k] = first + k < end ? widen(x[base + (first + k) * l.behind]) : neutral;
      total = k ? Op::of(total, v[k]) : v[k];
    }
    across<Op>(total, neutral, prefix, all);
    W sum = Op::of(carry, prefix);
    carry = Op::of(carry, all);
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
      const W next = Op::of(sum, v[k]);
      if (first + k < end) y[base + (first + k) * l.behind] = narrow<T>(is_exclusive ? sum : next);
      sum = next;
    }
  }
}

// What each chunk comes to.
template <class T, class Op> DEVICE void whole(const T* x, typename Wide<T>::type* totals, const Line& l, u64 bits) {
  typedef typename Wide<T>::type W;
  const i64 line = blockIdx.x / l.chunks, number = blockIdx.x - line * l.chunks, before = line / l.behind;
  const i64 base = before * l.length * l.behind + (line - before * l.behind);
  const i64 begin = number * l.chunk, end = min(l.length, begin + l.chunk);
  const T nothing = *(const T*)&bits;
  const W neutral = widen(nothing);
  W total = neutral, prefix, all;
  for (i64 i = begin + threadIdx.x; i < end; i += BLOCK) total = Op::of(total, widen(x[base + i * l.behind]));
  across<Op>(total, neutral, prefix, all);
  if (!threadIdx.x) totals[blockIdx.x] = all;
}

// What each segment of x, which is [length, behind], comes to. One block a segment and column.
template <class T, class Op> DEVICE void segment(const T* x, const i64* offsets, T* y, i64* status, i64 length, i64 behind, u64 bits) {
  typedef typename Wide<T>::type W;
  const i64 number = blockIdx.x / behind, column = blockIdx.x - number * behind;
  const i64 begin = offsets[number], end = offsets[number + 1];
  if (begin < 0 || end < begin || end > length) {
    if (!threadIdx.x) status[1] = number, status[0] = 1;
    return;
  }
  const T nothing = *(const T*)&bits;
  const W neutral = widen(nothing);
  W total = neutral, prefix, all;
  for (i64 i = begin + threadIdx.x; i < end; i += BLOCK) total = Op::of(total, widen(x[i * behind + column]));
  across<Op>(total, neutral, prefix, all);
  if (!threadIdx.x) y[number * behind + column] = narrow<T>(all);
}

#define KERNEL(name) extern "C" __global__ void __launch_bounds__(BLOCK) name
#define SCAN(T, name, Op)                                                                                                                                  \
  KERNEL(scan_##name##_##T)(const T* x, T* y, const typename Wide<T>::type* carries, i64 length, i64 behind, i64 chunk, i64 chunks, u64 bits, i64 is_exclusive) { \
    scan<T, Op>(x, y, carries, Line{length, behind, chunk, chunks}, bits, is_exclusive);                                                                     \
  }                                                                                                                                                        \
  KERNEL(scan_whole_##name##_##T)(const T* x, typename Wide<T>::type* totals, i64 length, i64 behind, i64 chunk, i64 chunks, u64 bits) {                     \
    whole<T, Op>(x, totals, Line{length, behind, chunk, chunks}, bits);                                                                                      \
  }
#define SEGMENT(T, name, Op)                                                                                                                               \
  KERNEL(scan_segment_##name##_##T)(const T* x, const i64* offsets, T* y, i64* status, i64 length, i64 behind, u64 bits) {                                   \
    segment<T, Op>(x, offsets, y, status, length, behind, bits);                                                                                             \
  }
#define SCANS(T) SCAN(T, cumsum, Add) SCAN(T, cumprod, Mul) SCAN(T, cummax, Larger) SCAN(T, cummin, Smaller) \
  SEGMENT(T, cumsum, Add) SEGMENT(T, cumprod, Mul) SEGMENT(T, cummax, Larger) SEGMENT(T, cummin, Smaller)
SCANS(f16) SCANS(bf16) SCANS(f32) SCANS(f64) SCANS(i8) SCANS(i16) SCANS(i32) SCANS(i64) SCANS(u8) SCANS(u16) SCANS(u32) SCANS(u64)
