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

template <class T> DEVICE Pack<T, Lanes<T>::count> load_pack(const T* p) {
  if (aligned16(p)) return *(const Pack<T, Lanes<T>::count>*)p;
  return load_any(p);
}

// The results are cut where they can be stored as packs; the first and the last one need not be whole.
template <class T> DEVICE i64 place_of(const T* y) {
  constexpr int N = Lanes<T>::count;
  return ((i64)blockIdx.x * blockDim.x + threadIdx.x) * N - (i64)(((u64)y & 15) / sizeof(T));
}

// Whether the pack at i can be read as such: whole, and where it is not aligned, with whole packs beside it.
template <class T> DEVICE bool is_whole(const T* x, i64 i, i64 n) {
  constexpr int N = Lanes<T>::count;
  const int margin = aligned16(x + i) ? 0 : N;
  return i >= margin && i + N + margin <= n;
}

template <class F, class T> DEVICE void unary(const T* x, T* y, i64 n) {
  constexpr int N = Lanes<T>::count;
  i64 i = place_of(y);
  if (is_whole(x, i, n)) {
    Pack<T, N> p = load_pack(x + i);
#pragma unroll
    for (int k = 0; k < N; ++k) p.v[k] = apply<F>(p.v[k]);
    *(Pack<T, N>*)(y + i) = p;
  } else {
    for (i64 end = min(i + N, n), k = max(i, 0ll); k < end; ++k) y[k] = apply<F>(x[k]);
  }
}

template <class F, class T> DEVICE void binary(const T* a, const T* b, T* y, i64 n) {
  constexpr int N = Lanes<T>::count;
  i64 i = place_of(y);
  if (is_whole(a, i, n) && is_whole(b, i, n)) {
    Pack<T, N> p = load_pack(a + i), q = load_pack(b + i);
#pragma unroll
    for (int k = 0; k < N; ++k) p.v[k] = apply<F>(p.v[k], q.v[k]);
    *(Pack<T, N>*)(y + i) = p;
  } else {
    for (i64 end = min(i + N, n), k = max(i, 0ll); k < end; ++k) y[k] = apply<F>(a[k], b[k]);
  }
}

#define UNARY(name, F, T) extern "C" __global__ void unary_##name##_##T(const T* x, T* y, i64 n) { unary<F>(x, y, n); }
#define BINARY(name, F, T) extern "C" __global__ void binary_##name##_##T(const T* a, const T* b, T* y, i64 n) { binary<F>(a, b, y, n); }
