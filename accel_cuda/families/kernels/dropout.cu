// Dropout: a thread takes the elements of one block of the seed's stream.

struct Dropout {
  u64 x, y, size, seed, offset, least;  // least: below which the upper 24 bits of a word drop the element
  f64 scale;
};

template <class T> DEVICE void dropout(const Dropout& d) {
  typedef typename Wide<T>::type W;
  typedef Pack<T, 4> P;
  const u64 index = d.offset / 4 + (u64)blockIdx.x * blockDim.x + threadIdx.x;
  const i64 first = (i64)(index * 4 - d.offset), size = (i64)d.size;
  if (first >= size) return;
  const Block block = philox(d.seed, index, 0);
  const T* x = (const T*)d.x + first;
  T* y = (T*)d.y + first;
  const W scale = (W)d.scale;
  auto made = [&](T element, int n) { return narrow<T>((block.w[n] >> 8) >= (u32)d.least ? (W)widen(element) * scale : W(0)); };
  if (d.offset % 4 == 0 && (d.x | d.y) % sizeof(P) == 0 && first + 4 <= size) {
    P pack = *(const P*)x;
#pragma unroll
    for (int n = 0; n < 4; ++n) pack.v[n] = made(pack.v[n], n);
    *(P*)y = pack;
    return;
  }
#pragma unroll
  for (int n = 0; n < 4; ++n)
    if (first + n >= 0 && first + n < size) y[n] = made(x[n], n);
}

#define DROPOUT(T) extern "C" __global__ void __launch_bounds__(256) dropout_any_##T(const __grid_constant__ Dropout d) { dropout<T>(d); }
