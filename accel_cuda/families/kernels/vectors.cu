// BLAS on vectors without gaps. Sums are made in two launches: of one partial result a block, and of these, in the order of the blocks.

template <class W> DEVICE W factor(double re, double im) {
  if constexpr (Kind<W>::complex) {
    typedef decltype(W::re) R;
    return W{(R)re, (R)im};
  } else {
    return (W)re;
  }
}

template <class T> DEVICE Pack<T, Lanes<T>::count> load_pack(const T* p) {
  if (aligned16(p)) return *(const Pack<T, Lanes<T>::count>*)p;
  return load_any(p);
}

// y = alpha * x, or alpha * x + y.
template <bool adds, class T> DEVICE void scaled(const T* x, T* y, i64 n, double re, double im) {
  typedef typename Wide<T>::type W;
  constexpr int N = Lanes<T>::count;
  const W alpha = factor<W>(re, im);
  auto of = [&](T a, T b) {
    W product = mul(alpha, widen(a));
    if constexpr (adds) product = add(product, widen(b));
    return narrow<T>(product);
  };
  // The results are cut where they can be stored as packs; the first and the last one need not be whole.
  i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * N - (i64)(((u64)y & 15) / sizeof(T));
  const int margin = aligned16(x + i) ? 0 : N;  // what is not aligned is read with what is beside it
  if (i >= margin && i + N + margin <= n) {
    Pack<T, N> p = load_pack(x + i), q = p;
    if constexpr (adds) q = *(const Pack<T, N>*)(y + i);
#pragma unroll
    for (int k = 0; k < N; ++k) p.v[k] = of(p.v[k], q.v[k]);
    *(Pack<T, N>*)(y + i) = p;
  } else {
    for (i64 end = min(i + N, n), k = max(i, 0ll); k < end; ++k) y[k] = of(x[k], y[k]);
  }
}

template <class W> DEVICE W shuffle(W value, int offset) {
  W other;
  const int* from = (const int*)&value;
  int* to = (int*)&other;
#pragma unroll
  for (int k = 0; k < (int)(sizeof(W) / 4); ++k) to[k] = __shfl_xor_sync(0xffffffffu, from[k], offset);
  return other;
}

// The sum over a block of 256 threads, for its first thread.
template <class W> DEVICE W of_block(W value) {
  __shared__ alignas(16) char storage[8 * sizeof(W)];
  W* sums = (W*)storage;
  for (int offset = 16; offset; offset /= 2) value = add(value, shuffle(value, offset));
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x == 0)
    for (int warp = 1; warp < 8; ++warp) value = add(value, sums[warp]);
  return value;
}

// Squares of a norm. Of a float64 they can overflow or vanish: large and small elements are scaled, and summed apart from the others (Blue's algorithm).
// The other types are squared in a type in which that cannot be.
template <class W> struct Squares { W sum; };
struct Apart { double large, middle, small; };
template <class T> struct Norm { typedef Squares<double> type; };
template <> struct Norm<f16> { typedef Squares<float> type; };
template <> struct Norm<f64> { typedef Apart type; };

constexpr double LARGE = 1.9979190722022350e+146, SMALL = 1.4916681462400413e-154, SHRINK = 1.1113793747425387e-162, GROW = 4.4989137945431964e+161;

template <class W> DEVICE Squares<W> add(Squares<W> a, Squares<W> b) { return Squares<W>{a.sum + b.sum}; }
DEVICE Apart add(Apart a, Apart b) { return Apart{a.large + b.large, a.middle + b.middle, a.small + b.small}; }
template <class W, class X> DEVICE void square(Squares<W>& to, X x) { to.sum += (W)x * (W)x; }
DEVICE void square(Apart& to, double x) {
  double size = fabs(x);
  if (size > LARGE) to.large += (size * SHRINK) * (size * SHRINK);
  else if (size < SMALL) to.small += (size * GROW) * (size * GROW);
  else to.middle += size * size;  // NaN too
}
template <class W> DEVICE W root(Squares<W> of) { return sqrt(of.sum); }
DEVICE double root(Apart of) {
  bool is_middle = of.middle > 0 || of.middle != of.middle;
  if (of.large > 0) return sqrt(is_middle ? of.large + of.middle * SHRINK * SHRINK : of.large) / SHRINK;
  if (of.small == 0) return sqrt(of.middle);
  if (!is_middle) return sqrt(of.small) / GROW;
  double a = sqrt(of.small) / GROW, b = sqrt(of.middle), high = a > b ? a : b, low = a > b ? b : a;
  return high * sqrt(1 + (low / high) * (low / high));
}

struct Dot {
  template <class T> using Partial = typename Wide<T>::type;
  template <class T, class P> static DEVICE void take(P& to, T x, T y) { to = add(to, mul(widen(x), widen(y))); }
  template <class T, class P> static DEVICE T end(P sum) { return narrow<T>(sum); }
};
struct Nrm2 {
  template <class T> using Partial = typename Norm<T>::type;
  template <class T, class P> static DEVICE void take(P& to, T x, T) { square(to, widen(x)); }
  template <class T, class P> static DEVICE T end(P sum) { return narrow<T>((typename Wide<T>::type)root(sum)); }
};

template <class F, class T> DEVICE void gather(const T* __restrict__ x, const T* __restrict__ y, T* out, typename F::template Partial<T>* partial, i64 n) {
  typedef typename F::template Partial<T> P;
  constexpr int N = Lanes<T>::count;
  P sum = {};
  i64 packs = n / N, step = (i64)gridDim.x * blockDim.x, thread = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (aligned16(x) && aligned16(y)) {
#pragma unroll 4
    for (i64 i = thread; i < packs; i += step) {
      Pack<T, N> p = load_whole<T>(x + i * N), q = load_whole<T>(y + i * N);
#pragma unroll
      for (int k = 0; k < N; ++k) F::take(sum, p.v[k], q.v[k]);
    }
    for (i64 i = packs * N + thread; i < n; i += step) F::take(sum, x[i], y[i]);
  } else {
    // The first and the last pack are taken one by one: the others are read with what is beside them.
#pragma unroll 4
    for (i64 i = thread + 1; i < packs - 1; i += step) {
      Pack<T, N> p = load_any(x + i * N), q = load_any(y + i * N);
#pragma unroll
      for (int k = 0; k < N; ++k) F::take(sum, p.v[k], q.v[k]);
    }
    i64 first = min((i64)N, n), last = max(first, (packs - 1) * N);
    for (i64 i = thread; i < first; i += step) F::take(sum, x[i], y[i]);
    for (i64 i = last + thread; i < n; i += step) F::take(sum, x[i], y[i]);
  }
  sum = of_block(sum);
  if (threadIdx.x) return;
  if (gridDim.x == 1) *out = F::template end<T>(sum);
  else partial[blockIdx.x] = sum;
}

template <class F, class T> DEVICE void conclude(const typename F::template Partial<T>* partial, T* out, i64 count) {
  typename F::template Partial<T> sum = {};
  for (i64 i = threadIdx.x; i < count; i += blockDim.x) sum = add(sum, partial[i]);
  sum = of_block(sum);
  if (threadIdx.x == 0) *out = F::template end<T>(sum);
}

#define VECTORS(T)                                                                                                                             \
  extern "C" __global__ void axpy_##T(const T* x, T* y, i64 n, double re, double im) { scaled<true>(x, y, n, re, im); }                         \
  extern "C" __global__ void scal_##T(const T* x, T* y, i64 n, double re, double im) { scaled<false>(x, y, n, re, im); }                        \
  extern "C" __global__ void __launch_bounds__(256) dot_##T(const T* x, const T* y, T* out, Dot::Partial<T>* partial, i64 n) {                  \
    gather<Dot>(x, y, out, partial, n);                                                                                                        \
  }                                                                                                                                            \
  extern "C" __global__ void dot_end_##T(const Dot::Partial<T>* partial, T* out, i64 count) { conclude<Dot>(partial, out, count); }
#define NORM(T)                                                                                                                                \
  extern "C" __global__ void __launch_bounds__(256) nrm2_##T(const T* x, T* out, Nrm2::Partial<T>* partial, i64 n) {                            \
    gather<Nrm2>(x, x, out, partial, n);                                                                                                       \
  }                                                                                                                                            \
  extern "C" __global__ void nrm2_end_##T(const Nrm2::Partial<T>* partial, T* out, i64 count) { conclude<Nrm2>(partial, out, count); }

// cuBLAS counts the places of extremes from 1.
extern "C" __global__ void index_from_zero(i64* index) { *index -= 1; }

// Addresses of matrices, which calls of cuBLAS read from the device: any, as arguments, and those of matrices that lie so many bytes apart.
struct Given { i64 count; u64* out; u64 values[448]; };
extern "C" __global__ void addresses_given(const Given given) {
  for (i64 i = threadIdx.x; i < given.count; i += blockDim.x) given.out[i] = given.values[i];
}
extern "C" __global__ void addresses_apart(u64* out, u64 first, u64 step, i64 count) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = first + (u64)i * step;
}
