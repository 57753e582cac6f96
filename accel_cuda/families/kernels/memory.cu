// Patterns that the driver has no fill for, the scaling that is left of a product of nothing, what benchmarks wait for, and faults on purpose.

extern "C" __global__ void fill8(u64* y, u64 low, u64 high, i64 count) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) y[i] = low;
}
extern "C" __global__ void fill16(u64* y, u64 low, u64 high, i64 count) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) { y[2 * i] = low; y[2 * i + 1] = high; }
}

// C = beta * C for a batch of column-major matrices; with beta == 0 C is not read.
template <class T> DEVICE void scale(T* c, i64 m, i64 n, i64 ldc, i64 stride, i64 count, double re, double im) {
  typedef typename Wide<T>::type W;
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= m * n * count) return;
  T* element = c + i / (m * n) * stride + i / m % n * ldc + i % m;
  if constexpr (Kind<T>::complex) {
    typedef decltype(element->re) R;
    *element = re == 0 && im == 0 ? T{} : mul(T{(R)re, (R)im}, *element);
  } else {
    *element = re == 0 ? T{} : narrow<T>((W)re * widen(*element));
  }
}
#define SCALE(T)                                                                                                          \
  extern "C" __global__ void scale_##T(T* c, i64 m, i64 n, i64 ldc, i64 stride, i64 count, double re, double im) {         \
    scale(c, m, n, ldc, stride, count, re, im);                                                                           \
  }
SCALE(f16) SCALE(bf16) SCALE(f32) SCALE(f64) SCALE(c64) SCALE(c128)

// A checksum of bytes: the sum over their 64-bit words, each mixed with its place, so that any change and any exchange shows. The last word is filled up
// with zeros, and the length is one word more. The result is added to *sum.
DEVICE u64 mixed(u64 z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
DEVICE u64 word_at(const unsigned char* x, i64 first, i64 nbytes) {
  u64 word = 0;
  for (i64 i = 0; i < 8 && first + i < nbytes; ++i) word |= (u64)x[first + i] << (8 * i);
  return word;
}
extern "C" __global__ void checksum(const unsigned char* x, i64 nbytes, u64* sum) {
  const u64 step = 0x9e3779b97f4a7c15ull;
  i64 start = (i64)blockIdx.x * blockDim.x + threadIdx.x, stride = (i64)gridDim.x * blockDim.x;
  i64 whole = ((u64)x & 7) == 0 ? nbytes / 8 : 0, words = (nbytes + 7) / 8;
  u64 own = start == 0 ? mixed((u64)nbytes) : 0;
#pragma unroll 4
  for (i64 i = start; i < whole; i += stride) own += mixed(((const u64*)x)[i] + (u64)(i + 1) * step);
  for (i64 i = whole + start; i < words; i += stride) own += mixed(word_at(x, 8 * i, nbytes) + (u64)(i + 1) * step);
  for (int lane = 16; lane; lane /= 2) own += __shfl_down_sync(0xffffffffu, own, lane);
  if ((threadIdx.x & 31) == 0) atomicAdd(sum, own);
}

extern "C" __global__ void empty() {}
extern "C" __global__ void spin(u64 nanoseconds) {
  u64 start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < nanoseconds);
}
extern "C" __global__ void poison() { *(volatile int*)0x10 = 1; }
extern "C" __global__ void hang(volatile int* flag) {
  while (*flag == 0) __nanosleep(1000);
}
