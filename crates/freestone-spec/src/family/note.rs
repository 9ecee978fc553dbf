//! The note in the memory of a family: its algorithms, with which the next server adopts it.

use freestone::codec::Algorithm;
use freestone::ram::FullPolicy;
use serde::{Deserialize, Serialize};

use super::{FamilySpec, SECONDARIES, SecondarySpec};
use crate::keys::parse_algorithm;

/// Settings of a family that never change, as JSON.
#[derive(Serialize, Deserialize)]
struct Note {
    comp_algorithm: String,
    algorithm_params: String,
    /// Algorithm and parameters at each priority.
    recomp_algorithms: [Option<(String, String)>; SECONDARIES],
}

/// Returns the note of a family.
pub(super) fn of(spec: &FamilySpec) -> String {
    let secondary =
        |one: &Option<SecondarySpec>| one.as_ref().map(|one| (one.algorithm.to_string(), one.params.clone()));
    let note = Note {
        comp_algorithm: spec.comp_algorithm.to_string(),
        algorithm_params: spec.algorithm_params.clone(),
        recomp_algorithms: spec.recomp_algorithms.each_ref().map(secondary),
    };
    serde_json::to_string(&note).unwrap_or_default()
}

impl FamilySpec {
    /// Returns the settings in the note of a family, with the memory limit and the policy for a full pool of
    /// `present`.
    ///
    /// # Errors
    /// Returns the reason if the note is damaged.
    pub fn of_note(note: &[u8], present: Option<&Self>) -> Result<Self, String> {
        let damaged = |why: &dyn std::fmt::Display| format!("its settings are damaged: {why}");
        let note: Note = serde_json::from_slice(note).map_err(|why| damaged(&why))?;
        let algorithm = |text: &str| parse_algorithm(text).map_err(|why| damaged(&why));
        let mut recomp_algorithms: [Option<SecondarySpec>; SECONDARIES] = Default::default();
        for (place, one) in recomp_algorithms.iter_mut().zip(note.recomp_algorithms) {
            if let Some((name, params)) = one {
                *place = Some(SecondarySpec { algorithm: algorithm(&name)?, params });
            }
        }
        let comp_algorithm: Algorithm = algorithm(&note.comp_algorithm)?;
        Ok(Self {
            comp_algorithm,
            algorithm_params: note.algorithm_params,
            mem_limit: present.and_then(|spec| spec.mem_limit),
            recomp_algorithms,
            auto_recompress: None,
            auto_group: None,
            auto_dedup: None,
            backing: None,
            when_full: present.map_or_else(FullPolicy::default, |spec| spec.when_full),
        })
    }
}
