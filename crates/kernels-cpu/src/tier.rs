//! Which instruction set the kernels use, and how one is chosen.

use std::env;

/// A set of kernels. Later tiers are faster; all agree with [`Tier::Scalar`] within rounding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tier {
    /// Plain loops: the oracle of the other tiers, and the only one on machines other than x86-64.
    Scalar,
    /// AVX2 with FMA and F16C, 8 lanes.
    Avx2,
    /// AVX-512 F, BW, VL and DQ, 16 lanes.
    Avx512,
    /// The same with VNNI, for products of bytes.
    Avx512Vnni,
    /// The same with products of bfloat16 pairs: bfloat16 weights are multiplied as they are, and the rows they meet are
    /// rounded to bfloat16.
    Avx512Bf16,
}

/// The environment variable that forces a tier.
const TIER_VARIABLE: &str = "STROBE_CPU";

/// Why a tier asked for by name cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TierError {
    /// The name is not that of a tier.
    #[error(
        "{TIER_VARIABLE}={found:?} is not a CPU tier: expected one of scalar, avx2, avx512, avx512vnni, avx512bf16 (this machine has {available}), or leave it unset"
    )]
    Unknown {
        /// The value found.
        found: String,
        /// The tiers this machine has.
        available: String,
    },
    /// The tier exists, but not on this machine.
    #[error(
        "{TIER_VARIABLE}={name} asks for a CPU tier that this machine lacks: it has {available}; choose one of those or leave it unset"
    )]
    Unavailable {
        /// The tier asked for.
        name: &'static str,
        /// The tiers this machine has.
        available: String,
    },
}

impl Tier {
    /// All tiers, slowest first.
    const ALL: [Tier; 5] = [Tier::Scalar, Tier::Avx2, Tier::Avx512, Tier::Avx512Vnni, Tier::Avx512Bf16];

    /// The best tier of this machine.
    pub fn detect() -> Tier {
        let best = Tier::ALL.into_iter().rfind(|tier| tier.is_available());
        best.unwrap_or(Tier::Scalar)
    }

    /// The tiers this machine can run, slowest first.
    pub fn available() -> Vec<Tier> {
        let mut tiers = Tier::ALL.to_vec();
        tiers.retain(|tier| tier.is_available());
        tiers
    }

    /// The tier named by `STROBE_CPU`, or the best one when it is unset or empty.
    pub fn from_env() -> Result<Tier, TierError> {
        match env::var_os(TIER_VARIABLE) {
            Some(value) if !value.is_empty() => Tier::by_name(&value.to_string_lossy()),
            _ => Ok(Tier::detect()),
        }
    }

    /// The tier of that name, if this machine has it.
    pub fn by_name(name: &str) -> Result<Tier, TierError> {
        match Tier::ALL.into_iter().find(|tier| tier.name() == name) {
            None => Err(TierError::Unknown { found: name.to_owned(), available: available_names() }),
            Some(tier) if tier.is_available() => Ok(tier),
            Some(tier) => Err(TierError::Unavailable { name: tier.name(), available: available_names() }),
        }
    }

    /// `scalar`, `avx2`, `avx512`, `avx512vnni` or `avx512bf16`.
    pub fn name(self) -> &'static str {
        match self {
            Tier::Scalar => "scalar",
            Tier::Avx2 => "avx2",
            Tier::Avx512 => "avx512",
            Tier::Avx512Vnni => "avx512vnni",
            Tier::Avx512Bf16 => "avx512bf16",
        }
    }

    /// Whether bfloat16 weights are multiplied in pairs, with rows rounded to bfloat16.
    pub fn multiplies_pairs(self) -> bool {
        self == Tier::Avx512Bf16
    }

    #[cfg(target_arch = "x86_64")]
    pub(crate) fn is_available(self) -> bool {
        match self {
            Tier::Scalar => true,
            Tier::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            Tier::Avx512 => {
                Tier::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
            }
            Tier::Avx512Vnni => Tier::Avx512.is_available() && is_x86_feature_detected!("avx512vnni"),
            Tier::Avx512Bf16 => Tier::Avx512Vnni.is_available() && is_x86_feature_detected!("avx512bf16"),
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn is_available(self) -> bool {
        self == Tier::Scalar
    }
}

fn available_names() -> String {
    let names: Vec<&str> = Tier::available().into_iter().map(Tier::name).collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back_to_their_tiers() {
        for tier in Tier::available() {
            assert_eq!(Tier::by_name(tier.name()), Ok(tier));
        }
        assert!(Tier::available().contains(&Tier::detect()));
    }

    #[test]
    fn an_unknown_name_is_refused_with_what_exists() {
        let message = Tier::by_name("neon").unwrap_err().to_string();
        assert!(message.contains("\"neon\"") && message.contains("scalar"), "{message}");
        assert!(!message.contains('\n'));
    }
}
