// Point `first + i` of Sobol's sequence in order of Gray's code: what its bits choose of a coordinate's 32 directions, and a shift behind them.
template <class T> DEVICE void sobol(const u32* directions, T* out, i64 size, i64 width, u64 first) {
  i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= size) return;
  i64 point = at;
  const u32* v = directions + split(point, width) * 33;
  u64 place = first + (u64)point;
  u32 x = v[32];
  int k = 0;
  for (u32 code = (u32)(place ^ place >> 1); code; code >>= 1, ++k)
    if (code & 1) x ^= v[k];
  if constexpr (sizeof(T) == 4) out[at] = (f32)(x >> 8) * 0x1p-24f;
  else out[at] = (f64)x * 0x1p-32;
}
extern "C" __global__ void sobol_f32(const u32* directions, f32* out, i64 size, i64 width, u64 first) { sobol(directions, out, size, width, first); }
extern "C" __global__ void sobol_f64(const u32* directions, f64* out, i64 size, i64 width, u64 first) { sobol(directions, out, size, width, first); }
