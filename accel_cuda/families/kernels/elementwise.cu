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

struct Gelu { template <class W> static DEVICE W of(W x) { return x * normcdf(x); } };
// In half the instructions; for large negative x it is 0 within float's rounding of 1.
struct HalfGelu { static DEVICE float of(float x) { const float half = 0.5f * x; return half + half * erff(x * 0.70710678f); } };
struct GeluTanh {
  // (1 + tanh(u)) / 2 is sigmoid(2 * u), which loses no digits where tanh is near -1.
  template <class W> static DEVICE W of(W x) { return x * Sigmoid::of(W(1.5957691216057308) * (x + W(0.044715) * x * x * x)); }
};
struct Silu { template <class W> static DEVICE W of(W x) { return x * Sigmoid::of(x); } };
struct Softplus { template <class W> static DEVICE W of(W x) { return larger(x, W(0)) + log1p(exp(-fabs(x))); } };
struct LeakyRelu { template <class W> static DEVICE W of(W x) { return x > W(0) ? x : x * W(0.01); } };
struct Elu { template <class W> static DEVICE W of(W x) { return x > W(0) ? x : expm1(x); } };
struct Sin { template <class W> static DEVICE W of(W x) { return sin(x); } };
struct Cos { template <class W> static DEVICE W of(W x) { return cos(x); } };
struct Tan { template <class W> static DEVICE W of(W x) { return tan(x); } };
struct Asin { template <class W> static DEVICE W of(W x) { return asin(x); } };
struct Acos { template <class W> static DEVICE W of(W x) { return acos(x); } };
struct Atan { template <class W> static DEVICE W of(W x) { return atan(x); } };
struct Sinh { template <class W> static DEVICE W of(W x) { return sinh(x); } };
struct Cosh { template <class W> static DEVICE W of(W x) { return cosh(x); } };
struct Log1p { template <class W> static DEVICE W of(W x) { return log1p(x); } };
struct Expm1 { template <class W> static DEVICE W of(W x) { return expm1(x); } };
struct Log2 { template <class W> static DEVICE W of(W x) { return log2(x); } };
struct Exp2 { template <class W> static DEVICE W of(W x) { return exp2(x); } };
struct Erf { template <class W> static DEVICE W of(W x) { return erf(x); } };
struct Rsqrt { template <class W> static DEVICE W of(W x) { return rsqrt(x); } };
struct Reciprocal { template <class W> static DEVICE W of(W x) { return W(1) / x; } };
struct Sign { template <class W> static DEVICE W of(W x) { return x != x ? x : (W)((x > W(0)) - (x < W(0))); } };
struct Floor { template <class W> static DEVICE W of(W x) { return floor(x); } };
struct Ceil { template <class W> static DEVICE W of(W x) { return ceil(x); } };
struct Round { template <class W> static DEVICE W of(W x) { return rint(x); } };
struct Isnan { template <class W> static DEVICE bool of(W x) { return x != x; } };
struct Isinf { template <class W> static DEVICE bool of(W x) { return x == x && x - x != x - x; } };
struct Isfinite { template <class W> static DEVICE bool of(W x) { return x - x == x - x; } };
struct LogicalNot { static DEVICE bool of(bool x) { return !x; } };

struct Pow {
  template <class W> static DEVICE W of(W a, W b) {
    if constexpr (!Kind<W>::integer) return pow(a, b);
    else {
      if constexpr (W(-1) < W(0))
        if (b < W(0)) return a == W(1) ? a : a == W(-1) ? (b & W(1) ? a : W(1)) : W(0);
      Unsigned<W> power = 1, square = (Unsigned<W>)a;
#pragma unroll 1
      for (Unsigned<W> rest = (Unsigned<W>)b; rest; rest >>= 1, square *= square)
        if (rest & 1) power *= square;
      return (W)power;
    }
  }
};
// With the sign of the divisor.
struct Remainder {
  template <class W> static DEVICE W of(W a, W b) {
    if constexpr (!Kind<W>::integer) {
      W rest = fmod(a, b);
      if (rest == W(0)) return copysign(W(0), b);
      return (b < W(0)) != (rest < W(0)) ? rest + b : rest;
    } else {
      if (b == W(0)) return W(0);
      if constexpr (W(-1) < W(0)) {
        if (b == W(-1)) return W(0);  // the quotient of the least number overflows
        W rest = a % b;
        return rest != W(0) && (b < W(0)) != (rest < W(0)) ? (W)(rest + b) : rest;
      } else return a % b;
    }
  }
};
struct Equal {
  template <class W> static DEVICE bool of(W a, W b) {
    if constexpr (Kind<W>::complex) return a.re == b.re && a.im == b.im;
    else return a == b;
  }
};
struct NotEqual { template <class W> static DEVICE bool of(W a, W b) { return !Equal::of(a, b); } };
struct Less { template <class W> static DEVICE bool of(W a, W b) { return a < b; } };
struct LessEqual { template <class W> static DEVICE bool of(W a, W b) { return a <= b; } };
struct Greater { template <class W> static DEVICE bool of(W a, W b) { return a > b; } };
struct GreaterEqual { template <class W> static DEVICE bool of(W a, W b) { return a >= b; } };
struct LogicalAnd { static DEVICE bool of(bool a, bool b) { return a && b; } };
struct LogicalOr { static DEVICE bool of(bool a, bool b) { return a || b; } };
struct LogicalXor { static DEVICE bool of(bool a, bool b) { return a != b; } };

// What computes a function of elements of type T: those of 16 bits keep so few digits that less will do.
template <class F, class T> struct For { typedef F type; };
template <> struct For<Gelu, f16> { typedef HalfGelu type; };
template <> struct For<Gelu, bf16> { typedef HalfGelu type; };

template <class F, class U, class T> DEVICE U apply(T x) { return narrow<U>(For<F, T>::type::of(widen(x))); }
template <class F, class U, class T> DEVICE U apply(T a, T b) { return narrow<U>(F::of(widen(a), widen(b))); }

template <class T> DEVICE Pack<T, Lanes<T>::count> load_pack(const T* p) {
  if (aligned16(p)) return *(const Pack<T, Lanes<T>::count>*)p;
  return load_any(p);
}

// The results are cut where they can be stored as packs; the first and the last one need not be whole.
template <class T, class U> DEVICE i64 place_of(const U* y) {
  constexpr int N = Lanes<T>::count;
  return ((i64)blockIdx.x * blockDim.x + threadIdx.x) * N - (i64)(((u64)y & (N * sizeof(U) - 1)) / sizeof(U));
}

// Whether the pack at i can be read as such: whole, and where it is not aligned, with whole packs beside it.
template <class T> DEVICE bool is_whole(const T* x, i64 i, i64 n) {
  constexpr int N = Lanes<T>::count;
  const int margin = aligned16(x + i) ? 0 : N;
  return i >= margin && i + N + margin <= n;
}

template <class F, class T, class U> DEVICE void unary(const T* x, U* y, i64 n) {
  constexpr int N = Lanes<T>::count;
  i64 i = place_of<T>(y);
  if (is_whole(x, i, n)) {
    Pack<T, N> p = load_pack(x + i);
    Pack<U, N> r;
#pragma unroll
    for (int k = 0; k < N; ++k) r.v[k] = apply<F, U>(p.v[k]);
    *(Pack<U, N>*)(y + i) = r;
  } else {
    for (i64 end = min(i + N, n), k = max(i, 0ll); k < end; ++k) y[k] = apply<F, U>(x[k]);
  }
}

template <class F, class T, class U> DEVICE void binary(const T* a, const T* b, U* y, i64 n) {
  constexpr int N = Lanes<T>::count;
  i64 i = place_of<T>(y);
  if (is_whole(a, i, n) && is_whole(b, i, n)) {
    Pack<T, N> p = load_pack(a + i), q = load_pack(b + i);
    Pack<U, N> r;
#pragma unroll
    for (int k = 0; k < N; ++k) r.v[k] = apply<F, U>(p.v[k], q.v[k]);
    *(Pack<U, N>*)(y + i) = r;
  } else {
    for (i64 end = min(i + N, n), k = max(i, 0ll); k < end; ++k) y[k] = apply<F, U>(a[k], b[k]);
  }
}

#define UNARY(name, F, T, U) extern "C" __global__ void unary_##name##_##T(const T* x, U* y, i64 n) { unary<F>(x, y, n); }
#define BINARY(name, F, T, U) extern "C" __global__ void binary_##name##_##T(const T* a, const T* b, U* y, i64 n) { binary<F>(a, b, y, n); }
