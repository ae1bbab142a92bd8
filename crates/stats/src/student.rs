//! Quantiles of the normal distribution and of Student's t.

/// The value below which a standard normal variable falls with probability `p`; infinite at 0 and 1: Student's t with
/// very many degrees of freedom.
#[must_use]
pub fn normal_quantile(p: f64) -> f64 {
    student_quantile(p, 1e9)
}

/// The value below which Student's t with `freedom` degrees of freedom falls with probability `p`.
///
/// By bisection on the distribution function, which is exact to rounding: no table, any confidence, any (also broken)
/// number of degrees. Infinite at 0 and 1, and where there is no degree of freedom.
#[must_use]
pub fn student_quantile(p: f64, freedom: f64) -> f64 {
    if !(p > 0.0 && p < 1.0) || freedom.is_nan() || freedom <= 0.0 {
        return if p < 0.5 { f64::NEG_INFINITY } else { f64::INFINITY };
    }
    if p < 0.5 {
        return -student_quantile(1.0 - p, freedom);
    }
    let (mut low, mut high) = (0.0, 1.0);
    while student_cdf(high, freedom) < p && high < 1e12 {
        (low, high) = (high, 2.0 * high);
    }
    for _ in 0..200 {
        let middle = f64::midpoint(low, high);
        if middle <= low || middle >= high {
            break;
        }
        if student_cdf(middle, freedom) < p { low = middle } else { high = middle }
    }
    f64::midpoint(low, high)
}

/// P(T <= t) for `t >= 0`.
fn student_cdf(t: f64, freedom: f64) -> f64 {
    1.0 - 0.5 * incomplete_beta(freedom / 2.0, 0.5, freedom / (freedom + t * t))
}

/// The regularised incomplete beta function, by its continued fraction (Lentz).
fn incomplete_beta(a: f64, b: f64, x: f64) -> f64 {
    if x <= 0.0 || x >= 1.0 {
        return if x <= 0.0 { 0.0 } else { 1.0 };
    }
    // Where a is huge (nearly normal), logarithms of gamma functions cancel: take their difference in one piece.
    let front = (log_beta_ratio(a, b) + a * x.ln() + b * (-x).ln_1p()).exp();
    if x < (a + 1.0) / (a + b + 2.0) {
        front * continued_fraction(a, b, x) / a
    } else {
        1.0 - front * continued_fraction(b, a, 1.0 - x) / b
    }
}

/// ln(gamma(a + b) / (gamma(a) gamma(b))).
fn log_beta_ratio(a: f64, b: f64) -> f64 {
    if a > 1e5 {
        // gamma(a + b) / gamma(a) ~ a^b (1 + b(b-1)/(2a)).
        return b * a.ln() + (b * (b - 1.0) / (2.0 * a)).ln_1p() - log_gamma(b);
    }
    log_gamma(a + b) - log_gamma(a) - log_gamma(b)
}

fn continued_fraction(a: f64, b: f64, x: f64) -> f64 {
    const TINY: f64 = 1e-300;
    let guard = |value: f64| if value.abs() < TINY { TINY } else { value };
    let mut c = 1.0;
    let mut d = 1.0 / guard(1.0 - (a + b) * x / (a + 1.0));
    let mut result = d;
    for m in 1..10_000 {
        let m = f64::from(m);
        let even = m * (b - m) * x / ((a + 2.0 * m - 1.0) * (a + 2.0 * m));
        d = 1.0 / guard(1.0 + even * d);
        c = guard(1.0 + even / c);
        result *= d * c;
        let odd = -(a + m) * (a + b + m) * x / ((a + 2.0 * m) * (a + 2.0 * m + 1.0));
        d = 1.0 / guard(1.0 + odd * d);
        c = guard(1.0 + odd / c);
        let step = d * c;
        result *= step;
        if (step - 1.0).abs() < 1e-15 {
            break;
        }
    }
    result
}

/// Logarithm of the gamma function for positive arguments (Lanczos, g = 7).
fn log_gamma(x: f64) -> f64 {
    const COEFFICIENTS: [f64; 8] = [
        676.520_368_121_885_1,
        -1_259.139_216_722_402_8,
        771.323_428_777_653_1,
        -176.615_029_162_140_6,
        12.507_343_278_686_905,
        -0.138_571_095_265_720_12,
        9.984_369_578_019_572e-6,
        1.505_632_735_149_311_6e-7,
    ];
    let x = x - 1.0;
    let t = x + 7.5;
    let series = COEFFICIENTS.iter().zip(1..).fold(0.999_999_999_999_809_9, |sum, (c, i)| sum + c / (x + f64::from(i)));
    0.5 * (2.0 * std::f64::consts::PI).ln() + (x + 0.5) * t.ln() - t + series.ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of R's `qt`.
    #[test]
    fn quantiles_are_those_of_the_tables() {
        let known = [
            (0.975, 1.0, 12.706_204_736),
            (0.975, 2.0, 4.302_652_730),
            (0.975, 4.0, 2.776_445_105),
            (0.995, 9.0, 3.249_835_542),
            (0.995, 4.0, 4.604_094_871),
            (0.975, 30.0, 2.042_272_456),
            (0.8, 5.0, 0.919_543_780),
            (0.9995, 3.0, 12.923_978_637),
        ];
        for (p, freedom, expected) in known {
            let found = student_quantile(p, freedom);
            assert!((found - expected).abs() < 1e-6 * expected, "{p} {freedom}: {found}");
            assert!((student_quantile(1.0 - p, freedom) + found).abs() < 1e-6);
        }
        assert!((normal_quantile(0.975) - 1.959_963_985).abs() < 1e-5);
        assert!((normal_quantile(0.8) - 0.841_621_234).abs() < 1e-5);
        assert!(normal_quantile(0.5).abs() < 1e-9);
    }

    #[test]
    fn nonsense_is_infinite_not_a_panic() {
        assert_eq!(student_quantile(1.0, 3.0), f64::INFINITY);
        assert_eq!(student_quantile(0.0, 3.0), f64::NEG_INFINITY);
        assert_eq!(student_quantile(0.9, 0.0), f64::INFINITY);
        assert_eq!(normal_quantile(f64::NAN), f64::INFINITY);
    }
}
