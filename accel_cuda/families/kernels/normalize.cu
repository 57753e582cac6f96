// Softmax and norms. Each is one pass over the memory: a row is read once, kept in registers, reduced, and written.
//
// kept:     rows of up to 16 Ki elements (8 Ki of f64, and of those that are taken one by one); a power of two of neighbouring lanes, or all warps of a block, hold a row.
// streamed: longer rows; a block reads each twice.
// columns:  softmax along an axis with elements behind it; neighbouring threads take neighbouring columns, which are read twice.
// channels: batch norm: each element by itself.
//
// Elements are taken 16 bytes at a time where all of a row lies so, and one by one elsewhere.

template <class W> DEVICE W infinity() { return (W)__int_as_float(0x7f800000); }

// Elements that are read once, and need no place in the first cache. Other threads may write other rows meanwhile.
template <class T, int N> DEVICE Pack<T, N> load_once(const T* p) {
  if constexpr (N == 1) return Pack<T, 1>{*p};
  else {
    Quad all;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(all.w[0]), "=r"(all.w[1]), "=r"(all.w[2]), "=r"(all.w[3]) : "l"(p));
    return *(const Pack<T, N>*)&all;
  }
}
// 16 bytes in one store: of some loops' copies the compiler would make narrow ones.
template <class T, int N> DEVICE void store(T* p, const Pack<T, N>& pack) {
  if constexpr (N == 1) *p = pack.v[0];
  else {
    const Quad& all = *(const Quad*)&pack;
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(all.w[0]), "r"(all.w[1]), "r"(all.w[2]), "r"(all.w[3]));
  }
}

// Of 16-bit floats the results need few digits: exponentials of two instructions.
template <class T, class W> DEVICE W exponential(W x) {
  if constexpr (sizeof(T) == 2) {
    W y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * W(1.4426950408889634)));
    return y;
  } else return exp(x);
}

struct Sum { template <class W> static DEVICE W none() { return W(0); } template <class W> static DEVICE W of(W a, W b) { return a + b; } };
struct Most { template <class W> static DEVICE W none() { return -infinity<W>(); } template <class W> static DEVICE W of(W a, W b) { return larger(a, b); } };

// Combines one value of each of the `width` threads of a row: a power of two of lanes, or all warps of the block, which leave theirs in `parts`.
template <class F, class W> DEVICE W across(W value, int width, W* parts) {
  for (int offset = min(width, 32) / 2; offset; offset /= 2) value = F::of(value, __shfl_xor_sync(0xffffffffu, value, offset));
  if (width > 32) {
    const int lane = threadIdx.x % 32, warps = width / 32;
    if (lane == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    value = lane < warps ? parts[lane] : F::template none<W>();
    for (int offset = 16; offset; offset /= 2) value = F::of(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}

// Sizes are in elements. Element i of row r has the parameters r % groups * channels + i / each.
struct Rows {
  u64 x, y, weight, bias;  // 0 for parameters that are left out
  i64 rows, length, groups, each, channels, width;
  f64 eps;
};

// Nothing that a kernel writes is a parameter: these loads may pass stores.
template <class T, int N> DEVICE Pack<T, N> parameters(const T* p) {
  if constexpr (N == 1) return Pack<T, 1>{*p};
  else return load_whole<T>(p);
}
DEVICE i64 first_parameter(const Rows& r, i64 row) {
  if (r.groups == 1) return 0;
  return (r.rows <= 0x7fffffffll ? (i64)((u32)row % (u32)r.groups) : row % r.groups) * r.channels;
}
// Multiplies K packs of elements of a row by its weights and adds its biases. All of a pack have one, or each its own; place(k) is where pack k is.
template <class T, int K, int N, class W, class Place> DEVICE void scale(const Rows& r, i64 row, W (&v)[K][N], Place place) {
  if (!(r.weight || r.bias)) return;
  const i64 first = first_parameter(r, row);
  const T *weight = (const T*)r.weight + first, *bias = (const T*)r.bias + first;
  if (r.each == 1) {
    if (r.weight)
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const Pack<T, N> pack = parameters<T, N>(weight + place(k));
#pragma unroll
        for (int n = 0; n < N; ++n) v[k][n] *= (W)widen(pack.v[n]);
      }
    if (r.bias)
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const Pack<T, N> pack = parameters<T, N>(bias + place(k));
#pragma unroll
        for (int n = 0; n < N; ++n) v[k][n] += (W)widen(pack.v[n]);
      }
  } else {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const auto i = place(k);
      const i64 channel = sizeof(i) == 4 || r.length <= 0x7fffffffll ? (i64)((u32)i / (u32)r.each) : i / r.each;
      const W factor = r.weight ? (W)widen(weight[channel]) : W(1), added = r.bias ? (W)widen(bias[channel]) : W(0);
#pragma unroll
      for (int n = 0; n < N; ++n) v[k][n] = v[k][n] * factor + added;
    }
  }
}

template <bool SOFTMAX, bool LOG, bool CENTRED> struct Kinds { static constexpr bool is_softmax = SOFTMAX, is_log = LOG, is_centred = CENTRED; };
typedef Kinds<true, false, false> Softmax;
typedef Kinds<true, true, false> LogSoftmax;
typedef Kinds<false, false, true> Norm;
typedef Kinds<false, false, false> RmsNorm;

// -- rows that threads hold

template <class Kind, class T, int N, int K> DEVICE void kept(const Rows& r) {
  typedef typename Wide<T>::type W;
  __shared__ W parts[2][32];
  const int width = (int)r.width, length = (int)r.length;
  int lane = threadIdx.x;
  i64 row = blockIdx.x;
  if (width <= 32) {
    const int shift = 31 - __clz(width);
    lane &= width - 1, row = row * (blockDim.x >> shift) + (threadIdx.x >> shift);
  }
  const bool is_row = row < r.rows;
  row = min(row, r.rows - 1);
  // Beyond the end the last elements are read again: loads without a branch are under way together.
  auto place = [&](int k) { return min((lane + k * width) * N, length - N); };
  auto is_inside = [&](int k) { return (lane + k * width) * N < length; };
  const T* x = (const T*)r.x + row * r.length;
  Pack<T, N> packs[K];
#pragma unroll
  for (int k = 0; k < K; ++k) packs[k] = load_once<T, N>(x + place(k));
  W v[K][N];
#pragma unroll
  for (int k = 0; k < K; ++k)
#pragma unroll
    for (int n = 0; n < N; ++n) v[k][n] = is_inside(k) ? (W)widen(packs[k].v[n]) : Kind::is_softmax ? -infinity<W>() : W(0);
  W shift = W(0), factor;
  if constexpr (Kind::is_softmax) {
    shift = -infinity<W>();
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int n = 0; n < N; ++n) shift = larger(shift, v[k][n]);
    shift = across<Most>(shift, width, parts[0]);
    W total = W(0);
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int n = 0; n < N; ++n) {
        v[k][n] -= shift;
        const W power = exponential<T>(v[k][n]);
        total += power;
        if constexpr (!Kind::is_log) v[k][n] = power;
      }
    total = across<Sum>(total, width, parts[1]);
    factor = Kind::is_log ? log(total) : W(1) / total;
  } else {
    if constexpr (Kind::is_centred) {
#pragma unroll
      for (int k = 0; k < K; ++k)
#pragma unroll
        for (int n = 0; n < N; ++n) shift += v[k][n];
      shift = across<Sum>(shift, width, parts[0]) / (W)r.length;
    }
    W squares = W(0);
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if constexpr (Kind::is_centred) v[k][n] = is_inside(k) ? v[k][n] - shift : W(0);
        squares += v[k][n] * v[k][n];
      }
    squares = across<Sum>(squares, width, parts[1]);
    factor = rsqrt(squares / (W)r.length + (W)r.eps);
  }
#pragma unroll
  for (int k = 0; k < K; ++k)
#pragma unroll
    for (int n = 0; n < N; ++n) v[k][n] = Kind::is_log ? v[k][n] - factor : v[k][n] * factor;
  if constexpr (!Kind::is_softmax) scale<T>(r, row, v, place);
  if (!is_row) return;
  T* y = (T*)r.y + row * r.length;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    Pack<T, N> pack;
#pragma unroll
    for (int n = 0; n < N; ++n) pack.v[n] = narrow<T>(v[k][n]);
    if (is_inside(k)) store(y + place(k), pack);
  }
}

// -- rows that are too long to be held

// Packs that a thread reads before it uses, or writes, the first of them.
constexpr int AT_ONCE = 4;

template <class T, int N, class Use> DEVICE void walk(const T* x, i64 length, Use use) {
  const int step = blockDim.x * N;
  for (i64 begin = (i64)threadIdx.x * N; begin < length; begin += AT_ONCE * step) {
    Pack<T, N> packs[AT_ONCE];
#pragma unroll
    for (int a = 0; a < AT_ONCE; ++a) packs[a] = load_once<T, N>(x + min(begin + a * step, length - N));
#pragma unroll
    for (int a = 0; a < AT_ONCE; ++a)
      if (begin + a * step < length) use(begin + a * step, packs[a]);
  }
}

template <class Kind, class T, int N> DEVICE void streamed(const Rows& r) {
  typedef typename Wide<T>::type W;
  __shared__ W parts[2][32];
  const int width = blockDim.x;
  const i64 row = blockIdx.x;
  const T* x = (const T*)r.x + row * r.length;
  W shift = W(0), factor;
  if constexpr (Kind::is_softmax) {
    // The largest element so far, and the sum of the exponentials beside it. -infinity is never subtracted.
    W most = -infinity<W>(), total = W(0);
    walk<T, N>(x, r.length, [&](i64, const Pack<T, N>& pack) {
      W high = widen(pack.v[0]);
#pragma unroll
      for (int n = 1; n < N; ++n) high = larger(high, (W)widen(pack.v[n]));
      if (high > most) total *= exponential<T>(most - high), most = high;
      const W base = most == -infinity<W>() ? W(0) : most;
#pragma unroll
      for (int n = 0; n < N; ++n) total += exponential<T>((W)widen(pack.v[n]) - base);
    });
    shift = across<Most>(most, width, parts[0]);
    total = across<Sum>(total * exponential<T>(most - (shift == -infinity<W>() ? W(0) : shift)), width, parts[1]);
    factor = Kind::is_log ? log(total) : W(1) / total;
  } else {
    // The mean and the sum of squared deviations of each pack, put together with those of the packs before it.
    W count = W(0), mean = W(0), squares = W(0);
    walk<T, N>(x, r.length, [&](i64, const Pack<T, N>& pack) {
      W here = W(0), share = W(0);
      if constexpr (Kind::is_centred) {
#pragma unroll
        for (int n = 0; n < N; ++n) here += (W)widen(pack.v[n]);
        here /= (W)N, share = (W)N / (count + (W)N);
      }
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const W off = (W)widen(pack.v[n]) - here;
        squares += off * off;
      }
      if constexpr (Kind::is_centred) {
        const W off = here - mean;
        squares += off * off * count * share, mean += off * share, count += (W)N;
      }
    });
    if constexpr (Kind::is_centred) {
      shift = across<Sum>(count * mean, width, parts[0]) / (W)r.length;
      squares += count * (mean - shift) * (mean - shift);
    }
    factor = rsqrt(across<Sum>(squares, width, parts[1]) / (W)r.length + (W)r.eps);
  }
  T* y = (T*)r.y + row * r.length;
  walk<T, N>(x, r.length, [&](i64 i, const Pack<T, N>& pack) {
    W v[1][N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const W off = (W)widen(pack.v[n]) - shift;
      if constexpr (!Kind::is_softmax) v[0][n] = off * factor;
      else v[0][n] = Kind::is_log ? off - factor : exponential<T>(off) * factor;
    }
    if constexpr (!Kind::is_softmax) scale<T>(r, row, v, [&](int) { return i; });
    Pack<T, N> to;
#pragma unroll
    for (int n = 0; n < N; ++n) to.v[n] = narrow<T>(v[0][n]);
    store(y + i, to);
  });
}

// -- softmax along an axis with elements behind it: [outer, length, inner], of which a block takes the columns of one tile

constexpr int COLUMN_THREADS = 512;
struct Columns { u64 x, y; i64 length, inner, tiles; };

template <class T> struct Exponents {
  typedef typename Wide<T>::type W;
  W most, total;
  DEVICE void take(W x) {
    if (x == -infinity<W>()) return;
    const W power = exponential<T>(-fabs(x - most));
    if (x > most) total = total * power + W(1), most = x;
    else total += power;
  }
  DEVICE void merge(const Exponents& other) {
    const W high = larger(most, other.most), base = high == -infinity<W>() ? W(0) : high;
    total = total * exponential<T>(most - base) + other.total * exponential<T>(other.most - base), most = high;
  }
};

template <class Kind, class T, int N> DEVICE void columns(const Columns& c) {
  typedef typename Wide<T>::type W;
  __shared__ alignas(16) char storage[COLUMN_THREADS * N * sizeof(Exponents<T>)];
  auto* states = (Exponents<T>(*)[N])storage;
  const i64 tile = blockIdx.x % c.tiles, column = (tile * blockDim.x + threadIdx.x) * N;
  const bool is_inside = column < c.inner;
  const i64 first = blockIdx.x / c.tiles * c.length * c.inner + (is_inside ? column : 0);
  const T* x = (const T*)c.x + first;
  T* y = (T*)c.y + first;
  Exponents<T> state[N];
#pragma unroll
  for (int n = 0; n < N; ++n) state[n] = Exponents<T>{-infinity<W>(), W(0)};
#pragma unroll 4
  for (i64 i = threadIdx.y; i < c.length; i += blockDim.y) {
    const Pack<T, N> pack = *(const Pack<T, N>*)(x + i * c.inner);
#pragma unroll
    for (int n = 0; n < N; ++n) state[n].take(widen(pack.v[n]));
  }
  const int place = threadIdx.y * blockDim.x + threadIdx.x;
  for (int half = blockDim.y / 2; half; half /= 2) {
#pragma unroll
    for (int n = 0; n < N; ++n) states[place][n] = state[n];
    __syncthreads();
    // All threads merge with one of the other half, so that all have the whole in the end.
    const int other = (threadIdx.y ^ half) * blockDim.x + threadIdx.x;
#pragma unroll
    for (int n = 0; n < N; ++n) state[n].merge(states[other][n]);
    __syncthreads();
  }
  if (!is_inside) return;
  W factor[N];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    // Where the largest is infinite, nothing is a number.
    const W total = state[n].total + (state[n].most - state[n].most);
    factor[n] = Kind::is_log ? log(total) : W(1) / total;
  }
  for (i64 begin = threadIdx.y; begin < c.length; begin += AT_ONCE * blockDim.y) {
    Pack<T, N> packs[AT_ONCE];
#pragma unroll
    for (int a = 0; a < AT_ONCE; ++a)
      if (begin + a * blockDim.y < c.length) packs[a] = *(const Pack<T, N>*)(x + (begin + a * blockDim.y) * c.inner);
#pragma unroll
    for (int a = 0; a < AT_ONCE; ++a) {
      const i64 i = begin + a * blockDim.y;
      if (i >= c.length) break;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const W off = (W)widen(packs[a].v[n]) - state[n].most;
        packs[a].v[n] = narrow<T>(Kind::is_log ? off - factor[n] : exponential<T>(off) * factor[n]);
      }
      store(y + i * c.inner, packs[a]);
    }
  }
}

// -- batch norm: [outer, channels, each], by packs of elements or one by one

struct Channels { u64 x, y, mean, var, weight, bias; i64 size, channels, each; f64 eps; };

template <class T, int N> DEVICE void channels(const Channels& c) {
  typedef typename Wide<T>::type W;
  const i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * N;
  if (i >= c.size) return;
  const T *x = (const T*)c.x, *mean = (const T*)c.mean, *var = (const T*)c.var, *weight = (const T*)c.weight, *bias = (const T*)c.bias;
  T* y = (T*)c.y;
  const i64 row = c.size <= 0x7fffffffll ? (i64)((u32)i / (u32)c.each) : i / c.each;
  i64 channel = c.size <= 0x7fffffffll ? (i64)((u32)row % (u32)c.channels) : row % c.channels, left = (row + 1) * c.each - i;
  Pack<T, N> pack;
  const bool is_whole = i + N <= c.size;
  if (is_whole) pack = *(const Pack<T, N>*)(x + i);
  const W eps = (W)c.eps;
  W off = W(0), factor = W(0), added = W(0);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    if (n == 0 || left == 0) {
      if (n) left = c.each, channel = channel + 1 == c.channels ? 0 : channel + 1;
      off = widen(mean[channel]), factor = rsqrt((W)widen(var[channel]) + eps);
      if (weight) factor *= (W)widen(weight[channel]);
      if (bias) added = widen(bias[channel]);
    }
    --left;
    if (is_whole) pack.v[n] = narrow<T>(((W)widen(pack.v[n]) - off) * factor + added);
    else if (i + n < c.size) y[i + n] = narrow<T>(((W)widen(x[i + n]) - off) * factor + added);
  }
  if (is_whole) *(Pack<T, N>*)(y + i) = pack;
}

// At most 64 registers, so that two blocks of the largest size fit: what they read must be under way at the same time.
#define KERNEL(name) extern "C" __global__ void __launch_bounds__(512, 2) name
#define ROWS(name, Kind, T, how, N, FEW, MANY)                                                            \
  KERNEL(name##_##how##_few_##T)(const __grid_constant__ Rows r) { kept<Kind, T, N, FEW>(r); }            \
  KERNEL(name##_##how##_many_##T)(const __grid_constant__ Rows r) { kept<Kind, T, N, MANY>(r); }          \
  KERNEL(name##_##how##_streamed_##T)(const __grid_constant__ Rows r) { streamed<Kind, T, N>(r); }
// PACKS and ELEMENTS are how many a thread holds of a long row.
#define BOTH(name, Kind, T, PACKS, ELEMENTS) ROWS(name, Kind, T, packed, Lanes<T>::count, 2, PACKS) ROWS(name, Kind, T, single, 1, 4, ELEMENTS)
#define COLUMNS(name, Kind, T, how, N) KERNEL(name##_##how##_columns_##T)(const __grid_constant__ Columns c) { columns<Kind, T, N>(c); }
#define CHANNELS(T, how, N) KERNEL(norm_channels_##how##_##T)(const __grid_constant__ Channels c) { channels<T, N>(c); }
#define SOFTMAX(T, PACKS, ELEMENTS)                                                                       \
  BOTH(softmax, Softmax, T, PACKS, ELEMENTS) BOTH(softmax_log, LogSoftmax, T, PACKS, ELEMENTS)            \
  COLUMNS(softmax, Softmax, T, packed, Lanes<T>::count) COLUMNS(softmax, Softmax, T, single, 1)           \
  COLUMNS(softmax_log, LogSoftmax, T, packed, Lanes<T>::count) COLUMNS(softmax_log, LogSoftmax, T, single, 1)
#define NORM(T, PACKS, ELEMENTS)                                                                          \
  BOTH(norm, Norm, T, PACKS, ELEMENTS) BOTH(norm_rms, RmsNorm, T, PACKS, ELEMENTS) CHANNELS(T, packed, Lanes<T>::count) CHANNELS(T, single, 1)
