// What all kernels share: element types, the types they are computed in, and arithmetic with numpy's meaning.
// No header is included: a machine needs the runtime compiler alone.

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
typedef float f32;
typedef double f64;
struct f16 { u16 bits; };
struct bf16 { u16 bits; };
struct b8 { u8 bits; };  // true is any value but 0
template <class R> struct alignas(2 * sizeof(R)) Complex { R re, im; };
typedef Complex<float> c64;
typedef Complex<double> c128;

#define DEVICE __device__ __forceinline__

template <class T> struct Kind { static constexpr bool integer = T(0.5f) == T(0), complex = false; };
template <> struct Kind<f16> { static constexpr bool integer = false, complex = false; };
template <> struct Kind<bf16> { static constexpr bool integer = false, complex = false; };
template <> struct Kind<b8> { static constexpr bool integer = false, complex = false; };
template <> struct Kind<bool> { static constexpr bool integer = false, complex = false; };
template <class R> struct Kind<Complex<R>> { static constexpr bool integer = false, complex = true; };

// The type that one element is computed in.
template <class T> struct Wide { typedef T type; };
template <> struct Wide<f16> { typedef float type; };
template <> struct Wide<bf16> { typedef float type; };
template <> struct Wide<b8> { typedef bool type; };

// Integers are added without a sign: overflow wraps, as in numpy, and is defined.
template <int bytes> struct Word { typedef u32 type; };
template <> struct Word<8> { typedef u64 type; };
template <class T> using Unsigned = typename Word<sizeof(T)>::type;

template <class T> DEVICE T widen(T x) { return x; }
DEVICE float widen(f16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
DEVICE float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
DEVICE bool widen(b8 x) { return x.bits != 0; }

template <class T, class W> struct Narrow { static DEVICE T of(W x) { return (T)x; } };
template <class R> struct Narrow<Complex<R>, Complex<R>> { static DEVICE Complex<R> of(Complex<R> x) { return x; } };
template <> struct Narrow<b8, bool> { static DEVICE b8 of(bool x) { return b8{(u8)(x ? 1 : 0)}; } };
template <> struct Narrow<f16, float> { static DEVICE f16 of(float x) { f16 y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); return y; } };
#if __CUDA_ARCH__ >= 800
template <> struct Narrow<bf16, float> { static DEVICE bf16 of(float x) { bf16 y; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); return y; } };
#else
template <> struct Narrow<bf16, float> {  // to the nearest, halves to even; a carry goes into the exponent, up to infinity
  static DEVICE bf16 of(float x) {
    u32 bits = __float_as_uint(x);
    return bf16{(u16)(x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
  }
};
#endif
// float32, with the last bit set where it does not hold the number: the rounding that follows is to the nearest then, and not a second one.
DEVICE float to_odd(float y, bool is_exact) { return is_exact ? y : __uint_as_float(__float_as_uint(y) | 1); }
DEVICE float to_odd(double x) { const float y = __double2float_rz(x); return to_odd(y, (double)y == x || x != x); }
DEVICE float to_odd(i32 x) { const float y = __int2float_rz(x); return to_odd(y, (i32)y == x); }
DEVICE float to_odd(u32 x) { const float y = __uint2float_rz(x); return to_odd(y, (u32)y == x); }
DEVICE float to_odd(i64 x) { const float y = __ll2float_rz(x); return to_odd(y, (i64)y == x); }
DEVICE float to_odd(u64 x) { const float y = __ull2float_rz(x); return to_odd(y, (u64)y == x); }
template <> struct Narrow<f16, double> { static DEVICE f16 of(double x) { f16 y; asm("cvt.rn.f16.f64 %0, %1;" : "=h"(y.bits) : "d"(x)); return y; } };
template <> struct Narrow<bf16, double> { static DEVICE bf16 of(double x) { return Narrow<bf16, float>::of(to_odd(x)); } };
template <class T, class W> DEVICE T narrow(W x) { return Narrow<T, W>::of(x); }

template <class W> DEVICE W add(W a, W b) {
  if constexpr (Kind<W>::complex) return W{a.re + b.re, a.im + b.im};
  else if constexpr (Kind<W>::integer) return (W)((Unsigned<W>)a + (Unsigned<W>)b);
  else return a + b;
}
template <class W> DEVICE W sub(W a, W b) {
  if constexpr (Kind<W>::complex) return W{a.re - b.re, a.im - b.im};
  else if constexpr (Kind<W>::integer) return (W)((Unsigned<W>)a - (Unsigned<W>)b);
  else return a - b;
}
template <class W> DEVICE W mul(W a, W b) {
  if constexpr (Kind<W>::complex) return W{a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
  else if constexpr (Kind<W>::integer) return (W)((Unsigned<W>)a * (Unsigned<W>)b);
  else return a * b;
}
// Smith's division: no square of an element, so nothing overflows that need not.
template <class R> DEVICE Complex<R> divide_complex(Complex<R> a, Complex<R> b) {
  if (fabs((double)b.re) >= fabs((double)b.im)) {
    if (b.re == R(0) && b.im == R(0)) return Complex<R>{a.re / fabs(b.re), a.im / fabs(b.re)};
    R ratio = b.im / b.re, scale = R(1) / (b.re + b.im * ratio);
    return Complex<R>{(a.re + a.im * ratio) * scale, (a.im - a.re * ratio) * scale};
  }
  R ratio = b.re / b.im, scale = R(1) / (b.im + b.re * ratio);
  return Complex<R>{(a.re * ratio + a.im) * scale, (a.im * ratio - a.re) * scale};
}
// A NaN in either operand is the result; fmax would drop it.
template <class W> DEVICE W larger(W a, W b) { return (a > b || a != a) ? a : b; }
template <class W> DEVICE W smaller(W a, W b) { return (a < b || a != a) ? a : b; }
#if __CUDA_ARCH__ >= 800
template <> DEVICE float larger(float a, float b) { float c; asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b)); return c; }
template <> DEVICE float smaller(float a, float b) { float c; asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b)); return c; }
#endif

// Divides i by n, of which both are positive, and returns the remainder. Division by 1 is free, and of small numbers it is several times as fast.
DEVICE i64 split(i64& i, i64 n) {
  if (n == 1) return 0;
  i64 whole = (u64)(i | n) >> 32 ? i / n : (i64)((u32)i / (u32)n), rest = i - whole * n;
  i = whole;
  return rest;
}

// N elements that are loaded and stored as one.
template <class T, int N> struct alignas(sizeof(T) * N) Pack { T v[N]; };
template <class T> struct Lanes { static constexpr int count = sizeof(T) >= 16 ? 1 : 16 / sizeof(T); };
DEVICE bool aligned16(const void* pointer) { return ((u64)pointer & 15) == 0; }

// 16 bytes from the address of any element: what the two granules of 16 bytes around it hold, put together. Both must lie in the array.
struct alignas(16) Quad { u32 w[4]; };
// 16 bytes that no thread of the kernel writes, in one load whatever their elements are: the compiler would load narrow ones one by one.
DEVICE Quad load_quad(const void* p) {
  Quad to;
  asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(to.w[0]), "=r"(to.w[1]), "=r"(to.w[2]), "=r"(to.w[3]) : "l"(p));
  return to;
}
template <class T> DEVICE Pack<T, Lanes<T>::count> load_whole(const void* p) {
  Quad all = load_quad(p);
  return *(const Pack<T, Lanes<T>::count>*)&all;
}
template <class T> DEVICE Pack<T, Lanes<T>::count> joined(const Quad& low, const Quad& high, u32 shift) {
  u32 w[8] = {low.w[0], low.w[1], low.w[2], low.w[3], high.w[0], high.w[1], high.w[2], high.w[3]};
  if constexpr (sizeof(T) < 16) {
    bool two = shift & 8;
#pragma unroll
    for (int k = 0; k < 6; ++k) w[k] = two ? w[k + 2] : w[k];
  }
  if constexpr (sizeof(T) < 8) {
    bool one = shift & 4;
#pragma unroll
    for (int k = 0; k < 5; ++k) w[k] = one ? w[k + 1] : w[k];
  }
  if constexpr (sizeof(T) < 4) {
#pragma unroll
    for (int k = 0; k < 4; ++k) w[k] = __funnelshift_r(w[k], w[k + 1], shift % 4 * 8);
  }
  Quad all = {{w[0], w[1], w[2], w[3]}};
  return *(const Pack<T, Lanes<T>::count>*)&all;
}
template <class T> DEVICE Pack<T, Lanes<T>::count> load_any(const T* p) {
  u64 address = (u64)p;
  return joined<T>(*(const Quad*)(address & ~15ull), *(const Quad*)((address + 15) & ~15ull), (u32)address & 15);
}
// A granule of which what lies in [begin, end), in bytes, is read element by element; the rest is 0.
template <class T> DEVICE Quad load_cut(u64 granule, u64 begin, u64 end) {
  if (granule >= begin && granule + 16 <= end) return load_quad((const void*)granule);
  Pack<T, Lanes<T>::count> some = {};
#pragma unroll
  for (int k = 0; k < Lanes<T>::count; ++k) {
    u64 place = granule + k * sizeof(T);
    if (place >= begin && place < end) some.v[k] = *(const T*)place;
  }
  return *(const Quad*)&some;
}
// Any 16 bytes near an array at [begin, end): elements outside it have any value.
template <class T> DEVICE Pack<T, Lanes<T>::count> load_part(const T* p, u64 begin, u64 end) {
  u64 address = (u64)p;
  return joined<T>(load_cut<T>(address & ~15ull, begin, end), load_cut<T>((address + 15) & ~15ull, begin, end), (u32)address & 15);
}
