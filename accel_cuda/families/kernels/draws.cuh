// How kernels write random numbers, as accel.ops.rng defines them.

DEVICE u64 pair(const Block& block, int i) { return block.w[2 * i] | (u64)block.w[2 * i + 1] << 32; }
DEVICE f32 root(f32 x) { f32 y; asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE f64 fraction(const Block& block, int i) { return (f64)(pair(block, i) >> 11) * 0x1p-53; }
DEVICE f64 inner(const Block& block, int i) { return ((f64)(pair(block, i) >> 12) + 0.5) * 0x1p-52; }
DEVICE double real(u64 bits) { return __longlong_as_double((i64)bits); }

constexpr int THREADS = 256, BLOCKS = 4;

// Writes the numbers of blocks that lie between `offset` and `offset + n`. A thread's block is `index`, its neighbours' are those beside it.
template <class D> struct Writer {
  typedef typename D::type T;
  typedef Pack<T, D::count> P;
  T* out;
  i64 n;
  u64 seed, offset;
  D numbers;
  // Whether a block's numbers can be stored as one.
  bool is_straight;
  DEVICE Writer(T* out, i64 n, u64 seed, u64 offset, D numbers)
      : out(out), n(n), seed(seed), offset(offset), numbers(numbers), is_straight(offset % D::count == 0 && (u64)out % sizeof(P) == 0) {}
  DEVICE i64 place(u64 index) const { return (i64)(index * D::count - offset); }
  DEVICE P made(const Block& block, u64 index) const {
    P made;
    numbers.of(block, seed, index, made.v);
    return made;
  }
  DEVICE bool is_inside(u64 first, u64 blocks) const { return place(first) >= 0 && place(first + blocks) <= n; }
  DEVICE void store(const P& made, u64 index) const { *(P*)(out + place(index)) = made; }
  DEVICE void store_some(const P& made, u64 index) const {
#pragma unroll
    for (int i = 0; i < D::count; ++i)
      if (place(index) + i >= 0 && place(index) + i < n) out[place(index) + i] = made.v[i];
  }
  // Neighbours exchange their numbers, so that they store side by side. All threads call it together.
  DEVICE void store_across(const P& made, u64 index) const {
    __shared__ P shared[THREADS];
    __syncthreads();
    shared[threadIdx.x] = made;
    __syncthreads();
    i64 first = place(index - threadIdx.x);
#pragma unroll
    for (int i = 0; i < D::count; ++i) {
      int at = i * THREADS + threadIdx.x;
      if (first + at >= 0 && first + at < n) out[first + at] = ((const T*)shared)[at];
    }
  }
};

template <class D> DEVICE void philox_draw(typename D::type* out, i64 n, u64 seed, u64 offset, D numbers) {
  Writer<D> writer(out, n, seed, offset, numbers);
  u64 index = offset / D::count + (u64)blockIdx.x * (THREADS * BLOCKS), end = (offset + n + D::count - 1) / D::count;
  if (writer.is_straight && writer.is_inside(index, THREADS * BLOCKS)) {
    index += threadIdx.x;
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i, index += THREADS) writer.store(writer.made(philox(seed, index, 0), index), index);
    return;
  }
  bool is_straight = writer.is_straight;
  for (int i = 0; i < BLOCKS && index < end; ++i, index += THREADS) {
    u64 own = index + threadIdx.x;
    auto made = writer.made(philox(seed, own, 0), own);
    if (is_straight) writer.store_some(made, own);
    else writer.store_across(made, own);
  }
}
