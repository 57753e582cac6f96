// Around the radix sorts and sums of cuda.compute: elements become unsigned numbers in the same order, and what was found is put into its place.
// Arrays have fewer than 2^31 elements.

template <class T> struct IsBool { static constexpr bool value = false; };
template <> struct IsBool<b8> { static constexpr bool value = true; };
template <int bytes> struct Exact { typedef u8 type; };
template <> struct Exact<2> { typedef u16 type; };
template <> struct Exact<4> { typedef u32 type; };
template <> struct Exact<8> { typedef u64 type; };
template <class T> using Code = typename Exact<sizeof(T)>::type;

// Bits of infinity.
template <class T> struct Infinity { static constexpr u64 bits = 0; };
template <> struct Infinity<f16> { static constexpr u64 bits = 0x7c00; };
template <> struct Infinity<bf16> { static constexpr u64 bits = 0x7f80; };
template <> struct Infinity<f32> { static constexpr u64 bits = 0x7f800000; };
template <> struct Infinity<f64> { static constexpr u64 bits = 0x7ff0000000000000; };

// An element as an unsigned number: NaNs are the largest one, and -0 is 0 if they are joined.
template <class T> DEVICE Code<T> encoded(T x, bool joined) {
  constexpr Code<T> top = (Code<T>)((Code<T>)1 << (8 * sizeof(T) - 1));
  Code<T> code = *(const Code<T>*)&x;
  if constexpr (IsBool<T>::value) return code != 0;
  else if constexpr (Kind<T>::integer) return T(-1) < T(0) ? (Code<T>)(code ^ top) : code;
  else {
    if ((Code<T>)(code & (Code<T>)~top) > (Code<T>)Infinity<T>::bits) return (Code<T>)~(Code<T>)0;
    if (joined && code == top) code = 0;
    return code & top ? (Code<T>)~code : (Code<T>)(code | top);
  }
}
template <class T> DEVICE T decoded(Code<T> code) {
  constexpr Code<T> top = (Code<T>)((Code<T>)1 << (8 * sizeof(T) - 1));
  Code<T> bits = code;
  if constexpr (IsBool<T>::value) bits = code & 1;
  else if constexpr (Kind<T>::integer) bits = T(-1) < T(0) ? (Code<T>)(code ^ top) : code;
  else if (code == (Code<T>)~(Code<T>)0) bits = (Code<T>)(Infinity<T>::bits | ((Infinity<T>::bits & ~(Infinity<T>::bits << 1)) >> 1));
  else bits = code & top ? (Code<T>)(code ^ top) : (Code<T>)~code;
  return *(const T*)&bits;
}
template <class T> DEVICE Code<T> turned(Code<T> code) { return IsBool<T>::value ? (Code<T>)(code ^ 1) : (Code<T>)~code; }

// x is [before, length, behind]. Its lines along the axis are sorted one behind the other: place i is element i % length of line i / length.
struct Lines { i64 size, length, behind; };
DEVICE u32 thread() { return blockIdx.x * blockDim.x + threadIdx.x; }
DEVICE i64 element(u32 line, u32 along, u32 length, u32 behind) {
  const u32 before = line / behind;
  return ((i64)before * length + along) * behind + (line - before * behind);
}

constexpr i64 JOINED = 1, FALLING = 2, LINES = 4;
// A key has the number of its line above the code of its element.
template <class T, class K> DEVICE void encode(const T* x, K* keys, u32* places, const Lines& l, i64 bits, i64 flags) {
  const u32 i = thread();
  if (i >= l.size) return;
  const u32 line = i / (u32)l.length;
  Code<T> code = encoded(x[element(line, i - line * (u32)l.length, (u32)l.length, (u32)l.behind)], flags & JOINED);
  if (flags & FALLING) code = turned<T>(code);
  keys[i] = (flags & LINES ? (K)line << bits : (K)0) | (K)code;
  if (places) places[i] = i;
}
template <class T, class K> DEVICE void decode(const K* keys, const u32* places, T* y, const Lines& l, i64 flags) {
  const u32 i = thread();
  if (i >= l.size) return;
  Code<T> code = (Code<T>)keys[places ? places[i] : i];
  if (flags & FALLING) code = turned<T>(code);
  const u32 line = i / (u32)l.length;
  y[element(line, i - line * (u32)l.length, (u32)l.length, (u32)l.behind)] = decoded<T>(code);
}
// The first k places of each line: their elements and their numbers along the axis.
template <class E> DEVICE void pick(const E* x, const u32* places, E* values, i64* indices, const Lines& l, i64 k) {
  const u32 i = thread();
  if (i >= l.size) return;
  const u32 length = (u32)l.length, line = i / (u32)k, rank = i - line * (u32)k;
  const u32 along = places[(i64)line * length + rank] % length;
  const i64 target = element(line, rank, (u32)k, (u32)l.behind);
  if (values) values[target] = x[element(line, along, length, (u32)l.behind)];
  indices[target] = along;
}

// The sum of x of all threads of a block up to each.
DEVICE u32 summed(u32 x, u32* warps) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const u32 other = __shfl_up_sync(~0u, x, by);
    if (lane >= by) x += other;
  }
  if (lane == 31) warps[warp] = x;
  __syncthreads();
  for (int w = 0; w < warp; ++w) x += warps[w];
  __syncthreads();
  return x;
}

// The k first elements of one line in order, one block a line. Digit by digit from the top, the elements that agree with the k-th one are counted by
// their next digit. Then those below it are taken, and the first ones of those that are equal to it, and both are sorted.
constexpr int THREADS = 256, MOST = 1024;
template <class T> DEVICE void select(const T* x, T* values, i64* indices, i64 length, i64 behind, i64 k, i64 flags, i64 is_kept) {
  typedef Code<T> C;
  extern __shared__ u64 space[];
  __shared__ u32 counts[THREADS], warps[THREADS / 32], chosen, below, taken;
  const u32 line = blockIdx.x, n = (u32)length, me = threadIdx.x;
  u32 width = 2;
  while (width < k) width *= 2;
  u64* codes = space;                  // of the k elements, and behind them their numbers
  u32* numbers = (u32*)(codes + width);
  C* kept = (C*)(numbers + width);
  auto code_of = [&](u32 t) {
    const C code = encoded(x[element(line, t, n, (u32)behind)], true);
    return flags & FALLING ? turned<T>(code) : code;
  };
  auto get = [&](u32 t) { return is_kept ? kept[t] : code_of(t); };
  if (is_kept)
    for (u32 t = me; t < n; t += THREADS) kept[t] = code_of(t);
  C prefix = 0, mask = 0;
  u32 want = (u32)k;
#pragma unroll 1
  for (int shift = 8 * (int)sizeof(C) - 8; shift >= 0; shift -= 8) {
    counts[me] = 0;
    __syncthreads();
    for (u32 t = me; t < n; t += THREADS) {
      const C code = get(t);
      if ((C)(code & mask) == prefix) atomicAdd(counts + (u32)(code >> shift & 255), 1u);
    }
    __syncthreads();
    const u32 mine = counts[me], to = summed(mine, warps);
    if (to - mine < want && want <= to) chosen = me, below = to - mine;
    __syncthreads();
    prefix |= (C)((C)chosen << shift), mask |= (C)((C)255 << shift), want -= below;
    __syncthreads();
  }
  if (!me) taken = 0;
  for (u32 i = me; i < width; i += THREADS) codes[i] = ~0ull, numbers[i] = ~0u;
  __syncthreads();
  const u32 lesser = (u32)k - want;
  u32 equal = 0;
  for (u32 tile = 0; tile < n; tile += THREADS) {
    const u32 t = tile + me;
    const C code = t < n ? get(t) : (C)0;
    const bool is_equal = t < n && code == prefix;
    u32 at = width;
    if (t < n && code < prefix) at = atomicAdd(&taken, 1u);
    if (equal < want) {
      const u32 rank = equal + summed(is_equal, warps);
      if (is_equal && rank <= want) at = lesser + rank - 1;
      if (me == THREADS - 1) counts[0] = rank;
      __syncthreads();
      equal = counts[0];
      __syncthreads();
    }
    if (at < width) codes[at] = code, numbers[at] = t;
  }
  __syncthreads();
#pragma unroll 1
  for (u32 size = 2; size <= width; size *= 2)
#pragma unroll 1
    for (u32 by = size / 2; by; by /= 2) {
      for (u32 i = me; i < width / 2; i += THREADS) {
        const u32 low = i / by * 2 * by + i % by, high = low + by;
        const u64 a = codes[low], b = codes[high];
        const u32 c = numbers[low], d = numbers[high];
        if ((a > b || (a == b && c > d)) == !(low & size)) codes[low] = b, codes[high] = a, numbers[low] = d, numbers[high] = c;
      }
      __syncthreads();
    }
  for (u32 i = me; i < k; i += THREADS) {
    const i64 target = element(line, i, (u32)k, (u32)behind);
    values[target] = x[element(line, numbers[i], n, (u32)behind)];
    indices[target] = numbers[i];
  }
}

// Elements that count are marked by 1; sums of the marks say which one each is, from 1.
template <class T> DEVICE bool is_nonzero(T x) {
  if constexpr (Kind<T>::complex) return x.re != 0 || x.im != 0;
  else if constexpr (IsBool<T>::value) return x.bits != 0;
  else return !(widen(x) == 0);
}
template <class T> DEVICE void mark(const T* x, u32* marks, i64 n) {
  const u32 i = thread();
  if (i < n) marks[i] = is_nonzero(x[i]);
}
template <class K> DEVICE void change(const K* keys, u32* marks, i64 n) {
  const u32 i = thread();
  if (i < n) marks[i] = !i || keys[i] != keys[i - 1];
}
// Returns which one it is, from 0, or -1 where it does not count or finds no room.
DEVICE i64 found(const u32* sums, u32 i, i64 room) {
  const u32 before = i ? sums[i - 1] : 0;
  return sums[i] != before && before < room ? (i64)before : -1;
}
struct Places { u64 sums; i64 size, room, dims, lengths[8]; u64 outputs[8]; };
template <class E> DEVICE void part(const u32* sums, const E* x, E* y, i64 size, i64 width, i64 room) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= size * width) return;
  const i64 row = i / width, to = found(sums, (u32)row, room);
  if (to >= 0) y[to * width + (i - row * width)] = x[i];
}
template <class T, class K> DEVICE void differ(const u32* sums, const K* keys, const u32* places, T* values, i64* indices, i64* inverse, u32* starts, i64 n, i64 room) {
  const u32 i = thread();
  if (i >= n) return;
  const u32 before = i ? sums[i - 1] : 0;
  if (inverse) inverse[places[i]] = (i64)sums[i] - 1;
  if (sums[i] == before) return;
  if (starts) starts[before] = i;
  if (before >= room) return;
  values[before] = decoded<T>((Code<T>)keys[i]);
  if (indices) indices[before] = places[i];
}

template <class T> DEVICE void search(const T* a, const T* v, i64* y, i64 n, i64 m, i64 is_right) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= m) return;
  const Code<T> code = encoded(v[i], true);
  i64 low = 0, high = n;
  while (low < high) {
    const i64 middle = low + (high - low) / 2;
    const Code<T> other = encoded(a[middle], true);
    if (other < code || (is_right && other == code)) low = middle + 1;
    else high = middle;
  }
  y[i] = low;
}

// Counts what bin(i) returns, -1 for nothing: in shared memory if it holds all bins.
template <class Bin> DEVICE void tally(u64* counts, i64 n, i64 bins, i64 is_shared, Bin bin) {
  extern __shared__ u32 local[];
  if (is_shared) {
    for (i64 b = threadIdx.x; b < bins; b += blockDim.x) local[b] = 0;
    __syncthreads();
  }
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) {
    const i64 b = bin(i);
    if (b < 0) continue;
    if (is_shared) atomicAdd(local + b, 1u);
    else atomicAdd(counts + b, 1ull);
  }
  if (is_shared) {
    __syncthreads();
    for (i64 b = threadIdx.x; b < bins; b += blockDim.x)
      if (local[b]) atomicAdd(counts + b, (u64)local[b]);
  }
}
template <class T> DEVICE i64 checked(T x, i64 length, i64* status) {
  if ((u64)(i64)x < (u64)length) return (i64)x;
  status[1] = (i64)x, status[0] = 1;
  return -1;
}
template <class T, class W> DEVICE void weigh(const T* x, const W* weights, W* sums, i64* status, i64 n, i64 length) {
  const u32 i = thread();
  if (i >= n) return;
  const i64 b = checked(x[i], length, status);
  if (b >= 0) atomicAdd(sums + b, weights[i]);
}
// The edges are those of numpy.linspace, and products are rounded before they are added, as there.
DEVICE double edge(i64 i, double low, double high, double step, i64 bins) { return i == bins ? high : __dadd_rn(__dmul_rn((double)i, step), low); }
DEVICE i64 bin_of(double x, double low, double high, double step, i64 bins) {
  if (!(x >= low && x <= high)) return -1;
  i64 b = (i64)__dmul_rn(__ddiv_rn(__dsub_rn(x, low), __dsub_rn(high, low)), (double)bins);
  if (b >= bins) b = bins - 1;
  if (x < edge(b, low, high, step, bins)) --b;
  else if (b != bins - 1 && x >= edge(b + 1, low, high, step, bins)) ++b;
  return b;
}

#define KERNEL(name) extern "C" __global__ void __launch_bounds__(256) name
KERNEL(sort_rows)(const u32* places, u32* rows, i64 n, i64 length) {
  const u32 i = thread();
  if (i < n) rows[i] = places[i] / (u32)length;
}
// The number of the segment that each place is in. Offsets that cut no array into segments are told by the status.
KERNEL(sort_segments)(const u32* places, u32* segments, const i64* offsets, i64* status, i64 n, i64 count) {
  const u32 i = thread();
  if (i <= count && (i ? offsets[i] < offsets[i - 1] : offsets[0] != 0)) status[1] = i, status[0] = 1;
  if (!i && offsets[count] != n) status[1] = count, status[0] = 1;
  if (i >= n || !places) return;
  i64 low = 0, high = count - 1;  // the last segment that begins at the place, or before it
  while (low < high) {
    const i64 middle = low + (high - low + 1) / 2;
    if (offsets[middle] <= places[i]) low = middle;
    else high = middle - 1;
  }
  segments[i] = (u32)low;
}
KERNEL(sort_change_4)(const u32* keys, u32* marks, i64 n) { change(keys, marks, n); }
KERNEL(sort_change_8)(const u64* keys, u32* marks, i64 n) { change(keys, marks, n); }
KERNEL(sort_count)(const u32* sums, i64* count, i64 n) { *count = n ? sums[n - 1] : 0; }
KERNEL(sort_indices)(const __grid_constant__ Places p) {
  const u32 i = thread();
  if (i >= p.size) return;
  const i64 to = found((const u32*)p.sums, i, p.room);
  if (to < 0) return;
  i64 rest = i;
  for (int d = (int)p.dims - 1; d >= 0; --d) {
    const i64 next = rest / p.lengths[d];
    ((i64*)p.outputs[d])[to] = rest - next * p.lengths[d];
    rest = next;
  }
}
KERNEL(sort_lengths)(const u32* sums, const u32* starts, i64* counts, i64 n, i64 room) {
  const u32 i = thread(), total = sums[n - 1];
  if (i < total && i < room) counts[i] = (i64)(i + 1 < total ? starts[i + 1] : (u32)n) - starts[i];
}

#define ORDER(T, K, bytes)                                                                                                                                      \
  KERNEL(sort_encode_##T##_##bytes)(const T* x, K* keys, u32* places, i64 size, i64 length, i64 behind, i64 bits, i64 flags) {                                    \
    encode(x, keys, places, Lines{size, length, behind}, bits, flags);                                                                                           \
  }                                                                                                                                                              \
  KERNEL(sort_decode_##T##_##bytes)(const K* keys, const u32* places, T* y, i64 size, i64 length, i64 behind, i64 flags) {                                        \
    decode(keys, places, y, Lines{size, length, behind}, flags);                                                                                                 \
  }
// What differs is found in one line: a key has no line's number.
#define UNIQUE(T, K, bytes)                                                                                                                                      \
  KERNEL(sort_differ_##T##_##bytes)(const u32* sums, const K* keys, const u32* places, T* values, i64* indices, i64* inverse, u32* starts, i64 n, i64 room) {     \
    differ(sums, keys, places, values, indices, inverse, starts, n, room);                                                                                       \
  }
#define MARKED(T) KERNEL(sort_mark_##T)(const T* x, u32* marks, i64 n) { mark(x, marks, n); }
#define SEARCHED(T) \
  MARKED(T) KERNEL(sort_search_##T)(const T* a, const T* v, i64* y, i64 n, i64 m, i64 is_right) { search(a, v, y, n, m, is_right); }
#define SELECTED(T)                                                                                                             \
  KERNEL(sort_select_##T)(const T* x, T* values, i64* indices, i64 length, i64 behind, i64 k, i64 flags, i64 is_kept) {         \
    select(x, values, indices, length, behind, k, flags, is_kept);                                                             \
  }
#define NARROW(T) ORDER(T, u32, 4) UNIQUE(T, u32, 4) SEARCHED(T) SELECTED(T)
#define SMALL(T) NARROW(T) ORDER(T, u64, 8)
#define WIDE(T) ORDER(T, u64, 8) UNIQUE(T, u64, 8) SEARCHED(T) SELECTED(T)
#define COUNTED(T)                                                                                                              \
  KERNEL(sort_tally_##T)(const T* x, u64* counts, i64* status, i64 n, i64 length, i64 is_shared) {                              \
    tally(counts, n, length, is_shared, [=](i64 i) { return checked(x[i], length, status); });                                  \
  }                                                                                                                             \
  KERNEL(sort_weigh_##T##_f32)(const T* x, const f32* w, f32* sums, i64* status, i64 n, i64 length) { weigh(x, w, sums, status, n, length); } \
  KERNEL(sort_weigh_##T##_f64)(const T* x, const f64* w, f64* sums, i64* status, i64 n, i64 length) { weigh(x, w, sums, status, n, length); }
#define BINNED(T)                                                                                                               \
  KERNEL(sort_bins_##T)(const T* x, u64* counts, i64 n, i64 bins, double low, double high, double step, i64 is_shared) {        \
    tally(counts, n, bins, is_shared, [=](i64 i) { return bin_of((double)widen(x[i]), low, high, step, bins); });               \
  }
#define MOVED(bytes, E)                                                                                                         \
  KERNEL(sort_part_##bytes)(const u32* sums, const E* x, E* y, i64 size, i64 width, i64 room) { part(sums, x, y, size, width, room); }
#define PICKED(bytes, E)                                                                                                        \
  KERNEL(sort_pick_##bytes)(const E* x, const u32* places, E* values, i64* indices, i64 size, i64 length, i64 behind, i64 k) {  \
    pick(x, places, values, indices, Lines{size, length, behind}, k);                                                           \
  }

NARROW(b8) SMALL(f16) SMALL(bf16) SMALL(f32) SMALL(i8) SMALL(i16) SMALL(i32) SMALL(u8) SMALL(u16) SMALL(u32)
WIDE(f64) WIDE(i64) WIDE(u64) MARKED(c64) MARKED(c128)
COUNTED(i8) COUNTED(i16) COUNTED(i32) COUNTED(i64) COUNTED(u8) COUNTED(u16) COUNTED(u32) COUNTED(u64)
BINNED(f16) BINNED(bf16) BINNED(f32) BINNED(f64) BINNED(i8) BINNED(i16) BINNED(i32) BINNED(i64) BINNED(u8) BINNED(u16) BINNED(u32) BINNED(u64)
MOVED(1, u8) MOVED(2, u16) MOVED(4, u32) MOVED(8, u64) MOVED(16, c128)
PICKED(1, u8) PICKED(2, u16) PICKED(4, u32) PICKED(8, u64)
