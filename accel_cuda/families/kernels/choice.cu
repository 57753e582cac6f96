// Elements in random order, and random elements: keys to sort by, running sums to search in, and the copies of what was chosen. It follows draws.cu.

DEVICE Block block_of(u64 seed, u64 number) { return philox(seed, number / 2, 0); }
constexpr i32 NO_WEIGHT = 1, TOO_FEW = 2;  // as in accel.ops.choices
constexpr u64 INFINITE = 0x7ff0000000000000ull, SIGN = 1ull << 63, NEVER = INFINITE | SIGN;  // NEVER: the key of what has no weight

DEVICE f64 weight_of(f64 p, i32* status) {
  if (p >= 0.0 && p < real(INFINITE)) return p;
  atomicOr(status, NO_WEIGHT);
  return 0.0;
}
extern "C" __global__ void choice_keys(u64* keys, u32* places, i64 n, u64 seed, u64 offset) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  keys[i] = pair(block_of(seed, offset + i), (offset + i) % 2);
  places[i] = (u32)i;
}
// Positive numbers are in the order of their bits, and negative ones in the other order.
DEVICE u64 in_order(f64 x) {
  u64 bits = (u64)__double_as_longlong(x);
  return bits & SIGN ? ~bits : bits | SIGN;
}
template <class T> DEVICE void clocks(u64* keys, u32* places, i64 n, u64 seed, u64 offset, const T* p, i32* status) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  f64 weight = weight_of(p[i], status), clock = log(-log(inner(block_of(seed, offset + i), (offset + i) % 2)));
  keys[i] = weight > 0.0 ? in_order(clock - log(weight)) : NEVER;
  places[i] = (u32)i;
}
extern "C" __global__ void choice_clocks_f32(u64* keys, u32* places, i64 n, u64 seed, u64 offset, const f32* p, i32* status) {
  clocks(keys, places, n, seed, offset, p, status);
}
extern "C" __global__ void choice_clocks_f64(u64* keys, u32* places, i64 n, u64 seed, u64 offset, const f64* p, i32* status) {
  clocks(keys, places, n, seed, offset, p, status);
}
// The bits of the largest weight, which is 0 before.
extern "C" __global__ void choice_largest(u64* largest, i64 n, const f64* p, i32* status) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  u64 bits = (u64)__double_as_longlong(weight_of(p[i], status));
  if (bits > *(volatile u64*)largest) atomicMax(largest, bits);
}
extern "C" __global__ void choice_weigh_f32(f64* weights, i64 n, const f32* p, i32* status) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) weights[i] = weight_of(p[i], status);
}
// By a power of 2, which rounds nothing, so that sums neither overflow nor lose digits.
extern "C" __global__ void choice_weigh_f64(f64* weights, i64 n, const f64* p, i32* status, const u64* largest) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) weights[i] = *largest ? ldexp(weight_of(p[i], status), -ilogb(real(*largest))) : 0.0;
}

// The first of the running sums that exceeds a fraction of the last one.
extern "C" __global__ void choice_search(i64* chosen, i64 count, u64 seed, u64 offset, const f64* sums, i64 n, i32* status) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  f64 total = sums[n - 1];
  if (total == 0.0 && i == 0) atomicOr(status, TOO_FEW);
  f64 place = fmin(__dmul_rn(fraction(block_of(seed, offset + i), (offset + i) % 2), total), nextafter(total, 0.0));
  i64 low = 0, high = n - 1;
  while (low < high) {
    i64 middle = (low + high) / 2;
    if (sums[middle] > place) high = middle;
    else low = middle + 1;
  }
  chosen[i] = low;
}
// The first places in order. Where one of them has no weight, there are too few; without weights there is no status.
extern "C" __global__ void choice_places(i64* chosen, i64 count, const u32* places, const u64* keys, i32* status) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  chosen[i] = places[i];
  if (status && keys[i] == NEVER) atomicOr(status, TOO_FEW);
}
// y[b][i][k] = x[b][chosen[i]][k]
template <class T> DEVICE void choice_take(T* y, i64 size, const T* x, const i64* chosen, i64 length, i64 count, i64 behind) {
  i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= size) return;
  i64 b = at, k = split(b, behind), i = split(b, count);
  y[at] = x[(b * length + chosen[i]) * behind + k];
}
#define TAKE(bytes, T)                                                                                                                     \
  extern "C" __global__ void choice_take_##bytes(T* y, i64 size, const T* x, const i64* chosen, i64 length, i64 count, i64 behind) {       \
    choice_take(y, size, x, chosen, length, count, behind);                                                                                \
  }
TAKE(1, u8)
TAKE(2, u16)
TAKE(4, u32)
TAKE(8, u64)
TAKE(16, c128)
DRAW(draws_words_8, Words<u64>)
DRAW(draws_pairs_8, Pairs<u64>)
