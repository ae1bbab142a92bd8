//! Numbers of a trace without rounding through floating point.

/// Microseconds in decimal text as nanoseconds, what is below a nanosecond rounded half up. `None`: not a number, or
/// more than 64 bits hold.
pub(super) fn micros_to_nanos(text: &[u8]) -> Option<i64> {
    scaled(text, 3)
}

/// A whole number in decimal text; a fraction is rounded half up.
pub(super) fn integer(text: &[u8]) -> Option<i64> {
    scaled(text, 0)
}

/// A number that may take all 64 bits: an address or an id. Negative numbers are taken as their two's complement.
pub(super) fn unsigned(text: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(text).ok()?;
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok().or_else(|| integer(text.as_bytes()).map(|signed| signed as u64)),
    }
}

/// A measured value.
pub(super) fn float(text: &[u8]) -> Option<f64> {
    std::str::from_utf8(text).ok()?.parse().ok().filter(|value: &f64| value.is_finite())
}

/// The number times ten to the power of `digits`, rounded half up.
#[inline(always)]
fn scaled(text: &[u8], digits: usize) -> Option<i64> {
    let (negative, number) = match text {
        [b'-', rest @ ..] => (true, rest),
        _ => (false, text),
    };
    // No exponent and at most `digits` places behind the point: every time of a real trace.
    let mut value = 0i64;
    let mut at = 0;
    while let Some(digit) = number.get(at).filter(|d| d.is_ascii_digit()) {
        value = value.wrapping_mul(10).wrapping_add(i64::from(digit - b'0'));
        at += 1;
    }
    if at == 0 || at > 18 || value >= i64::MAX / 10i64.pow(digits as u32) {
        return exact(number, digits, negative);
    }
    let fraction = match number.get(at) {
        None => &[][..],
        Some(b'.') => &number[at + 1..],
        Some(_) => return exact(number, digits, negative),
    };
    if fraction.len() > digits {
        return exact(number, digits, negative);
    }
    for place in 0..digits {
        let digit = fraction.get(place).copied().unwrap_or(b'0');
        if !digit.is_ascii_digit() {
            return exact(number, digits, negative);
        }
        value = value * 10 + i64::from(digit - b'0');
    }
    Some(if negative { -value } else { value })
}

/// The same for any number, exponents included.
#[cold]
fn exact(number: &[u8], digits: usize, negative: bool) -> Option<i64> {
    let (mantissa, exponent) = match number.iter().position(|b| matches!(b, b'e' | b'E')) {
        Some(e) => {
            let exponent = std::str::from_utf8(&number[e + 1..]).ok()?;
            (&number[..e], exponent.parse::<i64>().ok()?)
        }
        None => (number, 0),
    };
    let point = mantissa.iter().position(|&b| b == b'.');
    let (whole, fraction) = match point {
        Some(point) => (&mantissa[..point], &mantissa[point + 1..]),
        None => (mantissa, &[][..]),
    };
    if whole.is_empty() || whole.iter().chain(fraction).any(|b| !b.is_ascii_digit()) {
        return None;
    }
    // How many of the digits stand before the point of the result.
    let kept = (whole.len() as i64).saturating_add(exponent).saturating_add(digits as i64);
    let mut all = whole.iter().chain(fraction).map(|b| i128::from(b - b'0'));
    let mut value = 0i128;
    for _ in 0..kept.max(0) {
        let Some(digit) = all.next() else {
            // Zeros that the text does not write out; after 40 of them any number has overflowed, except zero.
            let missing = kept - (whole.len() + fraction.len()) as i64;
            value = match value {
                0 => 0,
                _ => value.checked_mul(10i128.checked_pow(u32::try_from(missing).ok()?)?)?,
            };
            break;
        };
        value = value * 10 + digit;
        if value > 1 << 64 {
            return None;
        }
    }
    if kept >= 0 {
        let half = all.next().unwrap_or(0);
        let below = all.any(|digit| digit > 0);
        let up = if negative { half > 5 || (half == 5 && below) } else { half >= 5 };
        value += i128::from(up);
    }
    i64::try_from(if negative { -value } else { value }).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_exact() {
        let cases: [(&str, Option<i64>); 26] = [
            ("0", Some(0)),
            ("-0", Some(0)),
            ("1712195495505582.988", Some(1_712_195_495_505_582_988)),
            ("3854287984388.998", Some(3_854_287_984_388_998)),
            ("1661938466265032", Some(1_661_938_466_265_032_000)),
            ("68.0", Some(68_000)),
            ("2.5", Some(2_500)),
            ("1.", Some(1_000)),
            ("0.0004", Some(0)),
            ("0.0005", Some(1)),
            ("-0.0005", Some(0)),
            ("-0.00051", Some(-1)),
            ("-1.5", Some(-1_500)),
            ("1.2349999999", Some(1_235)),
            ("1e3", Some(1_000_000)),
            ("1.5E-3", Some(2)),
            ("1.712195495505582988e+15", Some(1_712_195_495_505_582_988)),
            ("0e999999999999", Some(0)),
            ("1e-999999999999", Some(0)),
            ("9223372036854775.807", Some(i64::MAX)),
            ("9223372036854775.808", None),
            ("1e300", None),
            ("NaN", None),
            ("", None),
            ("1.2.3", None),
            ("--1", None),
        ];
        for (text, expected) in cases {
            assert_eq!(micros_to_nanos(text.as_bytes()), expected, "{text}");
        }
    }

    #[test]
    fn addresses_take_64_bits() {
        assert_eq!(unsigned(b"18446744073709551615"), Some(u64::MAX));
        assert_eq!(unsigned(b"0x7f00"), Some(0x7f00));
        assert_eq!(unsigned(b"-1"), Some(u64::MAX));
        assert_eq!(unsigned(b"x"), None);
    }

    proptest::proptest! {
        #[test]
        fn every_nanosecond_survives(nanos in -4_000_000_000_000_000_000i64..4_000_000_000_000_000_000) {
            let (sign, magnitude) = (if nanos < 0 { "-" } else { "" }, nanos.unsigned_abs());
            let text = format!("{sign}{}.{:03}", magnitude / 1000, magnitude % 1000);
            proptest::prop_assert_eq!(micros_to_nanos(text.as_bytes()), Some(nanos));
            let shifted = format!("{sign}{magnitude}e-3");
            proptest::prop_assert_eq!(micros_to_nanos(shifted.as_bytes()), Some(nanos));
        }
    }
}
