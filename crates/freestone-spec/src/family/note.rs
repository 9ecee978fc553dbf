//! The note in the memory of a family: settings that never change, with which the next server adopts it.

use std::time::Duration;

use freestone::codec::Algorithm;
use freestone::ram::FullPolicy;
use serde::{Deserialize, Serialize};

use super::{BackingPlace, BackingSpec, FamilySpec, SECONDARIES, SecondarySpec};
use crate::keys::parse_algorithm;
use crate::path_text;

/// Settings of a family that never change, as JSON.
#[derive(Serialize, Deserialize)]
struct Note {
    comp_algorithm: String,
    algorithm_params: String,
    /// Algorithm and parameters at each priority.
    recomp_algorithms: [Option<(String, String)>; SECONDARIES],
    /// Seconds.
    auto_recompress: Option<u64>,
    auto_group: Option<u64>,
    auto_dedup: Option<u64>,
    backing: Option<BackingNote>,
}

#[derive(Serialize, Deserialize)]
struct BackingNote {
    path: String,
    compressed_writeback: bool,
}

/// Returns the note of a family.
pub(super) fn of(spec: &FamilySpec) -> String {
    let secondary =
        |one: &Option<SecondarySpec>| one.as_ref().map(|one| (one.algorithm.to_string(), one.params.clone()));
    let note = Note {
        comp_algorithm: spec.comp_algorithm.to_string(),
        algorithm_params: spec.algorithm_params.clone(),
        recomp_algorithms: spec.recomp_algorithms.each_ref().map(secondary),
        auto_recompress: spec.auto_recompress.map(|age| age.as_secs()),
        auto_group: spec.auto_group.map(|age| age.as_secs()),
        auto_dedup: spec.auto_dedup.map(|age| age.as_secs()),
        backing: spec.backing.as_ref().map(|backing| BackingNote {
            path: path_text::text(&backing.place.path()),
            compressed_writeback: backing.compressed,
        }),
    };
    serde_json::to_string(&note).unwrap_or_default()
}

impl FamilySpec {
    /// Returns the settings in the note of a family, with those of `present` that can change: the memory limit,
    /// the policy for a full pool, and the limits of writeback.
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
        let present_backing = present.and_then(|spec| spec.backing.as_ref());
        let backing = note.backing.map(|backing| BackingSpec {
            place: BackingPlace::Path(path_text::path(&backing.path)),
            size: None,
            compressed: backing.compressed_writeback,
            limit: present_backing.map_or(0, |present| present.limit),
            limit_enable: present_backing.is_some_and(|present| present.limit_enable),
            batch_size: present_backing.and_then(|present| present.batch_size),
        });
        Ok(Self {
            comp_algorithm,
            algorithm_params: note.algorithm_params,
            mem_limit: present.and_then(|spec| spec.mem_limit),
            recomp_algorithms,
            auto_recompress: note.auto_recompress.map(Duration::from_secs),
            auto_group: note.auto_group.map(Duration::from_secs),
            auto_dedup: note.auto_dedup.map(Duration::from_secs),
            backing,
            when_full: present.map_or_else(FullPolicy::default, |spec| spec.when_full),
        })
    }
}
