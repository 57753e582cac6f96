// Functions of elements that lie anywhere: operands that are broadcast, numbers among the arguments, and conversions.

// -- conversions

struct Same { template <class W> static DEVICE W of(W x) { return x; } };
struct Pick { template <class W> static DEVICE W of(bool condition, W x, W y) { return condition ? x : y; } };
struct Clip { template <class W> static DEVICE W of(W x, W least, W most) { return smaller(larger(x, least), most); } };

template <class W> struct Narrow<f16, W> { static DEVICE f16 of(W x) { return Narrow<f16, float>::of((float)x); } };
template <class W> struct Narrow<bf16, W> {
  static DEVICE bf16 of(W x) {
    if constexpr (sizeof(W) >= 4) return Narrow<bf16, float>::of(to_odd(x));
    else return Narrow<bf16, float>::of((float)x);
  }
};
template <class W> struct Narrow<b8, W> {
  static DEVICE b8 of(W x) {
    if constexpr (Kind<W>::complex) return narrow<b8>(x.re != 0 || x.im != 0);
    else return narrow<b8>(x != W(0));
  }
};
template <class R, class W> struct Narrow<Complex<R>, W> { static DEVICE Complex<R> of(W x) { return Complex<R>{(R)x, R(0)}; } };
template <class R, class S> struct Narrow<Complex<R>, Complex<S>> { static DEVICE Complex<R> of(Complex<S> x) { return Complex<R>{(R)x.re, (R)x.im}; } };

// -- where elements are

#ifndef OPERANDS
#define OPERANDS 3
#endif
constexpr int DIMS = 8;

// Sizes are in elements. Dimension 0 is the outermost; an operand that is repeated has stride 0. A result that is_spread is a strided view.
struct Walk {
  alignas(16) u64 number[OPERANDS][2];  // complex ones are read as 16 bytes
  u64 y, operand[OPERANDS];  // 0 for a number
  i64 size, packs, dims, lengths[DIMS], strides[OPERANDS][DIMS];  // packs: whether elements can be taken 16 bytes at a time
  i64 is_spread, targets[DIMS];
};

template <class T> DEVICE const T* operand_of(const Walk& w, int k) { return (const T*)(w.operand[k] ? w.operand[k] : (u64)w.number[k]); }

// Finds the operands' elements for element i of the result.
template <int K, class I> DEVICE void locate(const Walk& w, I i, i64* at) {
#pragma unroll
  for (int k = 0; k < K; ++k) at[k] = 0;
#pragma unroll 1
  for (int d = (int)w.dims - 1; d > 0; --d) {
    const I next = i / (I)w.lengths[d], place = i - next * (I)w.lengths[d];
#pragma unroll
    for (int k = 0; k < K; ++k) at[k] += (i64)place * w.strides[k][d];
    i = next;
  }
#pragma unroll
  for (int k = 0; k < K; ++k) at[k] += (i64)i * w.strides[k][0];
}
template <int K> DEVICE void locate(const Walk& w, i64 i, i64* at) {
  if (w.size <= 0x7fffffffll) locate<K, u32>(w, (u32)i, at);
  else locate<K, u64>(w, (u64)i, at);
}

// Finds where element i of the result is.
template <class I> DEVICE i64 spread_target(const Walk& w, I i) {
  i64 at = 0;
#pragma unroll 1
  for (int d = (int)w.dims - 1; d > 0; --d) {
    const I next = i / (I)w.lengths[d];
    at += (i64)(i - next * (I)w.lengths[d]) * w.targets[d];
    i = next;
  }
  return at + (i64)i * w.targets[0];
}
DEVICE i64 target(const Walk& w, i64 i) {
  if (!w.is_spread) return i;
  return w.size <= 0x7fffffffll ? spread_target<u32>(w, (u32)i) : spread_target<u64>(w, (u64)i);
}

// N elements one after the other, or one N times.
template <class T, int N> DEVICE Pack<T, N> take(const T* p, bool is_repeated) {
  if (!is_repeated) return *(const Pack<T, N>*)p;
  const T value = *p;
  Pack<T, N> pack;
#pragma unroll
  for (int k = 0; k < N; ++k) pack.v[k] = value;
  return pack;
}

template <class F, class U, int N, class... P> DEVICE Pack<U, N> of_packs(const P&... packs) {
  Pack<U, N> result;
#pragma unroll
  for (int k = 0; k < N; ++k) result.v[k] = narrow<U>(F::of(widen(packs.v[k])...));
  return result;
}

template <int... K> struct Places {};
DEVICE constexpr int widest(int size) { return size; }
template <class... I> DEVICE constexpr int widest(int first, I... rest) { return first > widest(rest...) ? first : widest(rest...); }

// A thread takes a pack, or an element.
template <class F, class U, class... T, int... K> DEVICE void strided(const Walk& w, Places<K...>) {
  constexpr int BYTES = widest(sizeof(U), sizeof(T)...), N = BYTES >= 16 ? 1 : 16 / BYTES;
  U* y = (U*)w.y;
  const int per = w.packs ? N : 1, last = (int)w.dims - 1;
  const i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * per;
  i64 at[sizeof...(K)];
  if (w.packs && i + N <= w.size) {
    locate<sizeof...(K)>(w, i, at);
    *(Pack<U, N>*)(y + target(w, i)) = of_packs<F, U, N>(take<T, N>(operand_of<T>(w, K) + at[K], w.strides[K][last] == 0)...);
    return;
  }
#pragma unroll 1
  for (i64 k = i; k < min(i + per, w.size); ++k) {
    locate<sizeof...(K)>(w, k, at);
    y[target(w, k)] = narrow<U>(F::of(widen(operand_of<T>(w, K)[at[K]])...));
  }
}

#define KERNEL(name) extern "C" __global__ void __launch_bounds__(256) name(const __grid_constant__ Walk w)
#define SPREAD(name, F, T, U) KERNEL(spread_##name##_##T) { strided<F, U, T>(w, Places<0>()); }
#define BROADCAST(name, F, T, U) KERNEL(broadcast_##name##_##T) { strided<F, U, T, T>(w, Places<0, 1>()); }
#define WHERE(bytes, T) KERNEL(where_##bytes) { strided<Pick, T, b8, T, T>(w, Places<0, 1, 2>()); }
#define CLIP(T) KERNEL(broadcast_clip_##T) { strided<Clip, T, T, T, T>(w, Places<0, 1, 2>()); }
#define CAST(T, U) KERNEL(cast_##T##_##U) { strided<Same, U, T>(w, Places<0>()); }
