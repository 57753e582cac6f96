// Functions of one and of two elements: 16 bytes a thread where the pointers allow it.

struct Relu { template <class W> static DEVICE W of(W x) { return x < W(0) ? W(0) : x; } };
struct Sigmoid {
  template <class W> static DEVICE W of(W x) {
    // Of the two forms, the one whose exponential cannot overflow.
    W e = exp(x < W(0) ? x : -x);
    return x < W(0) ? e / (W(1) + e) : W(1) / (W(1) + e);
  }
};
struct Tanh { template <class W> static DEVICE W of(W x) { return tanh(x); } };
struct Exp { template <class W> static DEVICE W of(W x) { return exp(x); } };
struct Log { template <class W> static DEVICE W of(W x) { return log(x); } };
struct Sqrt { template <class W> static DEVICE W of(W x) { return sqrt(x); } };
struct Neg {
  template <class W> static DEVICE W of(W x) {
    if constexpr (Kind<W>::complex) return W{-x.re, -x.im};
    else if constexpr (Kind<W>::integer) return (W)(0 - (Unsigned<W>)x);
    else return -x;
  }
};
struct Abs {
  template <class W> static DEVICE W of(W x) {
    if constexpr (Kind<W>::integer) return x < W(0) ? (W)(0 - (Unsigned<W>)x) : x;
    else return fabs(x);
  }
};

struct Add { template <class W> static DEVICE W of(W a, W b) { return add(a, b); } };
struct Sub { template <class W> static DEVICE W of(W a, W b) { return sub(a, b); } };
struct Mul { template <class W> static DEVICE W of(W a, W b) { return mul(a, b); } };
struct Div {
  template <class W> static DEVICE W of(W a, W b) {
    if constexpr (Kind<W>::complex) return divide_complex(a, b);
    else return a / b;
  }
};
struct Max { template <class W> static DEVICE W of(W a, W b) { return larger(a, b); } };
struct Min { template <class W> static DEVICE W of(W a, W b) { return smaller(a, b); } };

template <class F, class T> DEVICE T apply(T x) { return narrow<T>(F::of(widen(x))); }
template <class F, class T> DEVICE T apply(T a, T b) { return narrow<T>(F::of(widen(a), widen(b))); }

template <class F, class T> DEVICE void unary(const T* x, T* y, i64 n) {
  constexpr int N = Lanes<T>::count;
  i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * N;
  if (i + N <= n && aligned16(x) && aligned16(y)) {
    Pack<T, N> p = *(const Pack<T, N>*)(x + i);
#pragma unroll
    for (int k = 0; k < N; ++k) p.v[k] = apply<F>(p.v[k]);
    *(Pack<T, N>*)(y + i) = p;
  } else {
    for (i64 end = min(i + N, n); i < end; ++i) y[i] = apply<F>(x[i]);
  }
}

template <class F, class T> DEVICE void binary(const T* a, const T* b, T* y, i64 n) {
  constexpr int N = Lanes<T>::count;
  i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * N;
  if (i + N <= n && aligned16(a) && aligned16(b) && aligned16(y)) {
    Pack<T, N> p = *(const Pack<T, N>*)(a + i), q = *(const Pack<T, N>*)(b + i);
#pragma unroll
    for (int k = 0; k < N; ++k) p.v[k] = apply<F>(p.v[k], q.v[k]);
    *(Pack<T, N>*)(y + i) = p;
  } else {
    for (i64 end = min(i + N, n); i < end; ++i) y[i] = apply<F>(a[i], b[i]);
  }
}

#define UNARY(name, F, T) extern "C" __global__ void unary_##name##_##T(const T* x, T* y, i64 n) { unary<F>(x, y, n); }
#define BINARY(name, F, T) extern "C" __global__ void binary_##name##_##T(const T* a, const T* b, T* y, i64 n) { binary<F>(a, b, y, n); }
