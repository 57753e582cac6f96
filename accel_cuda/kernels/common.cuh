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
template <class R> struct alignas(2 * sizeof(R)) Complex { R re, im; };
typedef Complex<float> c64;
typedef Complex<double> c128;

#define DEVICE __device__ __forceinline__

template <class T> struct Kind { static constexpr bool integer = T(0.5f) == T(0), complex = false; };
template <> struct Kind<f16> { static constexpr bool integer = false, complex = false; };
template <> struct Kind<bf16> { static constexpr bool integer = false, complex = false; };
template <class R> struct Kind<Complex<R>> { static constexpr bool integer = false, complex = true; };

// The type that one element is computed in.
template <class T> struct Wide { typedef T type; };
template <> struct Wide<f16> { typedef float type; };
template <> struct Wide<bf16> { typedef float type; };

// Integers are added without a sign: overflow wraps, as in numpy, and is defined.
template <int bytes> struct Word { typedef u32 type; };
template <> struct Word<8> { typedef u64 type; };
template <class T> using Unsigned = typename Word<sizeof(T)>::type;

template <class T> DEVICE T widen(T x) { return x; }
DEVICE float widen(f16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
DEVICE float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

template <class T, class W> struct Narrow { static DEVICE T of(W x) { return (T)x; } };
template <class R> struct Narrow<Complex<R>, Complex<R>> { static DEVICE Complex<R> of(Complex<R> x) { return x; } };
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

// N elements that are loaded and stored as one.
template <class T, int N> struct alignas(sizeof(T) * N) Pack { T v[N]; };
template <class T> struct Lanes { static constexpr int count = sizeof(T) >= 16 ? 1 : 16 / sizeof(T); };
DEVICE bool aligned16(const void* pointer) { return ((u64)pointer & 15) == 0; }
