// Functions that only fused kernels have: complex ones, bits, and what libraries of arrays have besides.

template <class R> DEVICE Complex<R> operator-(Complex<R> a, Complex<R> b) { return sub(a, b); }
template <class R> DEVICE bool operator==(Complex<R> a, Complex<R> b) { return a.re == b.re && a.im == b.im; }
template <class R> DEVICE bool operator!=(Complex<R> a, Complex<R> b) { return !(a == b); }

// Multiplied by i, and by -i.
template <class R> DEVICE Complex<R> turned(Complex<R> z) { return Complex<R>{-z.im, z.re}; }
template <class R> DEVICE Complex<R> turned_back(Complex<R> z) { return Complex<R>{z.im, -z.re}; }

template <class R> DEVICE Complex<R> exp(Complex<R> z) {
  const R size = exp(z.re);
  return z.im == R(0) ? Complex<R>{size, z.im} : Complex<R>{size * cos(z.im), size * sin(z.im)};
}
template <class R> DEVICE Complex<R> log(Complex<R> z) { return Complex<R>{log(hypot(z.re, z.im)), atan2(z.im, z.re)}; }
template <class R> DEVICE Complex<R> log2(Complex<R> z) { return Complex<R>{log2(hypot(z.re, z.im)), atan2(z.im, z.re) * R(1.4426950408889634)}; }
template <class R> DEVICE Complex<R> log10(Complex<R> z) { return Complex<R>{log10(hypot(z.re, z.im)), atan2(z.im, z.re) * R(0.4342944819032518)}; }
template <class R> DEVICE Complex<R> log1p(Complex<R> z) {
  const R re = R(1) + z.re, change = fma(z.im, z.im, z.re * (R(2) + z.re));
  // What |1 + z|^2 differs from 1 by has the digits of a small z; where it is large, near -1 too, the size itself has them, and does not overflow.
  return Complex<R>{fabs(change) < R(0.5) ? R(0.5) * log1p(change) : log(hypot(re, z.im)), atan2(z.im, re)};
}
template <class R> DEVICE Complex<R> expm1(Complex<R> z) {
  const R half = sin(R(0.5) * z.im);
  // Plus 0: the real part of -0 is 0, as the array API standard has it.
  return Complex<R>{expm1(z.re) * cos(z.im) - R(2) * half * half + R(0), exp(z.re) * sin(z.im)};
}
template <class R> DEVICE Complex<R> sqrt(Complex<R> z) {
  if (z.re == R(0) && z.im == R(0)) return Complex<R>{R(0), z.im};
  // The half of the larger part first: the sum of two squares must not overflow.
  const R root = sqrt(R(0.5) * fabs(z.re) + R(0.5) * hypot(z.re, z.im));
  return z.re >= R(0) ? Complex<R>{root, R(0.5) * z.im / root} : Complex<R>{R(0.5) * fabs(z.im) / root, copysign(root, z.im)};
}
template <class R> DEVICE Complex<R> pow(Complex<R> a, Complex<R> b) {
  if (b.re == R(0) && b.im == R(0)) return Complex<R>{R(1), R(0)};
  if (a.re == R(0) && a.im == R(0) && b.re > R(0)) return Complex<R>{R(0), R(0)};
  return exp(mul(b, log(a)));
}
template <class R> DEVICE Complex<R> sinh(Complex<R> z) { return Complex<R>{sinh(z.re) * cos(z.im), cosh(z.re) * sin(z.im)}; }
template <class R> DEVICE Complex<R> cosh(Complex<R> z) { return Complex<R>{cosh(z.re) * cos(z.im), sinh(z.re) * sin(z.im)}; }
template <class R> DEVICE Complex<R> tanh(Complex<R> z) {
  if (fabs(z.re) > R(20)) return Complex<R>{copysign(R(1), z.re), copysign(R(0), isinf(z.re) ? z.im : sin(R(2) * z.im))};
  // Kahan's formula: its sums have no terms of different signs, so that no digits are lost near the poles.
  const R t = tan(z.im), s = sinh(z.re), wide = R(1) + t * t, below = R(1) + wide * s * s;
  return Complex<R>{wide * sqrt(R(1) + s * s) * s / below, t / below};
}
template <class R> DEVICE Complex<R> sin(Complex<R> z) { return turned_back(sinh(turned(z))); }
template <class R> DEVICE Complex<R> cos(Complex<R> z) { return cosh(turned(z)); }
template <class R> DEVICE Complex<R> tan(Complex<R> z) { return turned_back(tanh(turned(z))); }

// Kahan's formulas ("Branch cuts for complex elementary functions", 1987): on the cuts, the sign of a zero decides.
template <class R> DEVICE Complex<R> asin(Complex<R> z) {
  const Complex<R> a = sqrt(Complex<R>{R(1) - z.re, -z.im}), b = sqrt(Complex<R>{R(1) + z.re, z.im});
  return Complex<R>{atan2(z.re, a.re * b.re - a.im * b.im), asinh(a.re * b.im - a.im * b.re)};
}
template <class R> DEVICE Complex<R> acos(Complex<R> z) {
  const Complex<R> a = sqrt(Complex<R>{R(1) - z.re, -z.im}), b = sqrt(Complex<R>{R(1) + z.re, z.im});
  return Complex<R>{R(2) * atan2(a.re, b.re), asinh(b.re * a.im - b.im * a.re)};
}
template <class R> DEVICE Complex<R> acosh(Complex<R> z) {
  const Complex<R> a = sqrt(Complex<R>{z.re - R(1), z.im}), b = sqrt(Complex<R>{z.re + R(1), z.im});
  return Complex<R>{asinh(a.re * b.re + a.im * b.im), R(2) * atan2(a.im, b.re)};
}
template <class R> DEVICE Complex<R> asinh(Complex<R> z) { return turned_back(asin(turned(z))); }
template <class R> DEVICE Complex<R> atanh(Complex<R> z) {
  const R size = fabs(z.re), away = R(1) - size;
  return Complex<R>{copysign(R(0.25) * log1p(R(4) * size / (away * away + z.im * z.im)), z.re),
                    R(0.5) * atan2(R(2) * z.im, (R(1) - z.re) * (R(1) + z.re) - z.im * z.im)};
}
template <class R> DEVICE Complex<R> atan(Complex<R> z) { return turned_back(atanh(turned(z))); }

struct ComplexAbs { template <class R> static DEVICE R of(Complex<R> z) { return hypot(z.re, z.im); } };
struct ComplexSign {
  template <class R> static DEVICE Complex<R> of(Complex<R> z) {
    if (z.re == R(0) && z.im == R(0)) return z;
    const R size = hypot(z.re, z.im);
    return Complex<R>{z.re / size, z.im / size};
  }
};
struct ComplexIsinf { template <class R> static DEVICE bool of(Complex<R> z) { return Isinf::of(z.re) || Isinf::of(z.im); } };
struct Conj { template <class W> static DEVICE W of(W z) { return W{z.re, -z.im}; } };
struct Real { template <class R> static DEVICE R of(Complex<R> z) { return z.re; } };
struct Imag { template <class R> static DEVICE R of(Complex<R> z) { return z.im; } };

struct Asinh { template <class W> static DEVICE W of(W x) { return asinh(x); } };
struct Acosh { template <class W> static DEVICE W of(W x) { return acosh(x); } };
struct Atanh { template <class W> static DEVICE W of(W x) { return atanh(x); } };
struct Log10 { template <class W> static DEVICE W of(W x) { return log10(x); } };
struct Trunc { template <class W> static DEVICE W of(W x) { return trunc(x); } };
struct Signbit { template <class W> static DEVICE bool of(W x) { return copysign(W(1), x) < W(0); } };
struct Atan2 { template <class W> static DEVICE W of(W a, W b) { return atan2(a, b); } };
struct Copysign { template <class W> static DEVICE W of(W a, W b) { return copysign(a, b); } };
struct Hypot { template <class W> static DEVICE W of(W a, W b) { return hypot(a, b); } };
struct Nextafter { template <class W> static DEVICE W of(W a, W b) { return nextafter(a, b); } };
struct Logaddexp {
  template <class W> static DEVICE W of(W a, W b) {
    if (a == b) return a + W(0.6931471805599453);
    const W apart = a - b;
    return apart > W(0) ? a + log1p(exp(-apart)) : b + log1p(exp(apart));
  }
};
// Towards minus infinity; of integers 0 where the divisor is 0. Infinities have the array API standard's quotients, and not Python's.
struct FloorDivide {
  template <class W> static DEVICE W of(W a, W b) {
    if constexpr (Kind<W>::integer) {
      if (b == W(0)) return W(0);
      if constexpr (W(-1) < W(0)) {
        if (b == W(-1)) return Neg::of(a);  // the quotient of the least number overflows
        const W quotient = a / b;
        return (W)(quotient - (quotient * b != a && (a < W(0)) != (b < W(0))));
      } else return a / b;
    } else {
      if (b == W(0) || isinf(b)) return floor(a / b);
      if (isinf(a)) return a / b;
      const W rest = fmod(a, b);
      W quotient = (a - rest) / b;
      if (rest != W(0) && (b < W(0)) != (rest < W(0))) quotient -= W(1);
      if (quotient == W(0)) return copysign(W(0), a / b);
      const W whole = floor(quotient);
      return quotient - whole > W(0.5) ? whole + W(1) : whole;
    }
  }
};
struct Invert {
  static DEVICE bool of(bool x) { return !x; }
  template <class W> static DEVICE W of(W x) { return (W)~x; }
};
struct BitwiseAnd { template <class W> static DEVICE W of(W a, W b) { return (W)(a & b); } };
struct BitwiseOr { template <class W> static DEVICE W of(W a, W b) { return (W)(a | b); } };
struct BitwiseXor { template <class W> static DEVICE W of(W a, W b) { return (W)(a ^ b); } };
// By as many places as an element has bits, or more, all are moved out.
struct LeftShift {
  template <class W> static DEVICE W of(W a, W b) { return (Unsigned<W>)b < 8 * sizeof(W) ? (W)((Unsigned<W>)a << b) : W(0); }
};
struct RightShift {
  template <class W> static DEVICE W of(W a, W b) { return (Unsigned<W>)b < 8 * sizeof(W) ? (W)(a >> b) : a < W(0) ? W(-1) : W(0); }
};
