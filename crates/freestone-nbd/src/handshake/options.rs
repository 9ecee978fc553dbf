//! The options that list exports, query or choose one, and select metadata contexts.

use std::sync::Arc;
use std::time::Duration;

use freestone_core::bytes::Bytes;
use freestone_core::client_log;
use freestone_core::device::Geometry;
use zerocopy::IntoBytes;

use super::{ChosenExport, Handshake, HandshakeError, Refusal};
use crate::limits::max_payload;
use crate::proto::{
    EXPORT_NAME_PADDING_BYTES, ExportNameReply, InfoBlockSize, InfoExport, MAX_PAYLOAD_BYTES,
    MAX_STRING_BYTES, TransmissionFlags, info, option, reply,
};
use crate::shared::export::{Export, JoinError};
use crate::shared::template::DeviceInfo;
use crate::wire::contexts::Contexts;
use crate::wire::headers::Headers;

/// Smallest preferred block size offered to clients, in bytes.
const PREFERRED_BLOCK_BYTES: u32 = 4096;
/// Time between the end of the wait for a full client limit and the handshake deadline. An error reply can be
/// sent in this time.
const REPLY_TIME: Duration = Duration::from_secs(1);

/// Maps the reason for a refused export to an error reply.
impl From<JoinError> for Refusal {
    fn from(error: JoinError) -> Self {
        let kind = match error {
            JoinError::Unknown => reply::ERR_UNKNOWN,
            JoinError::ShuttingDown => reply::ERR_SHUTDOWN,
            JoinError::TlsRequired => reply::ERR_TLS_REQD,
            JoinError::ClientLimit(_) | JoinError::Failed(_) => reply::ERR_POLICY,
        };
        (kind, error.into_message())
    }
}

impl Handshake<'_> {
    /// Chooses an export: counts the connection as its user, and creates a template's device.
    fn choose_export(&mut self, name: &str) -> Result<ChosenExport, JoinError> {
        let reserve = REPLY_TIME.min(self.shared.limits.handshake_timeout / 4);
        let until = self.timeouts.deadline.checked_sub(reserve).unwrap_or(self.timeouts.deadline);
        let export = self.shared.join_export(self.link, name, until)?;
        match export.open() {
            Ok((device, on_end)) => {
                *self.on_end = on_end;
                if let Some(ttl) = export.template().and_then(|template| template.ttl) {
                    self.shared.expire_after(self.link, ttl);
                }
                self.selected.take_if(|(selected, _)| selected != name);
                Ok((export, device))
            }
            Err(text) => {
                client_log!(warn, export = %export.name, text, "no device could be made for a client");
                self.shared.leave_export(self.link);
                Err(JoinError::Failed(truncate_message(text)))
            }
        }
    }

    pub(super) fn handle_export_name(&mut self, len: usize) -> Result<ChosenExport, HandshakeError> {
        if self.headers == Headers::Extended {
            return Err(HandshakeError::Violation("OPT_EXPORT_NAME after extended headers were negotiated"));
        }
        if len > MAX_STRING_BYTES {
            return Err(HandshakeError::Violation("an export name of more than 4096 bytes"));
        }
        self.receive_at_least(len)?;
        let name = std::str::from_utf8(&self.input.data()[..len])
            .map_err(|_| HandshakeError::Violation("an export name that is not UTF-8"))?
            .to_owned();
        self.input.consume(len);
        let (export, device) = self.choose_export(&name).map_err(|error| match error {
            JoinError::ClientLimit(_) | JoinError::Failed(_) => {
                HandshakeError::NoDevice(error.into_message().into_owned())
            }
            JoinError::TlsRequired => {
                HandshakeError::Violation("an export that requires TLS was chosen without TLS")
            }
            JoinError::Unknown | JoinError::ShuttingDown => {
                HandshakeError::Violation("an unknown export name")
            }
        })?;
        let geometry = Bytes::user_geometry(device.geometry());
        let flags = export.flags(&geometry, self.headers.have_chunks()).bits();
        let room = size_of::<ExportNameReply>() + EXPORT_NAME_PADDING_BYTES;
        self.replies.reserve(self.link.socket(), room)?;
        self.replies.put(&ExportNameReply { size: geometry.size.into(), flags: flags.into() });
        if !self.no_zeroes {
            self.replies.put(&[0_u8; EXPORT_NAME_PADDING_BYTES]);
        }
        Ok((export, device))
    }

    pub(super) fn handle_list(&mut self, data: &[u8]) -> Result<Result<(), Refusal>, HandshakeError> {
        if !data.is_empty() {
            return Ok(Err((reply::ERR_INVALID, "this option has no data".into())));
        }
        for export in self.shared.visible_exports(self.link) {
            let len = (export.name.len() as u32).to_be_bytes();
            let parts: [&[u8]; 3] = [&len, export.name.as_bytes(), export.description.as_bytes()];
            self.send_reply(option::LIST, reply::SERVER, &parts)?;
        }
        Ok(Ok(()))
    }

    /// Handles `OPT_INFO` and `OPT_GO`. Returns the export and its device for `OPT_GO`, and None for
    /// `OPT_INFO`.
    pub(super) fn handle_info(
        &mut self,
        kind: u32,
        data: &[u8],
    ) -> Result<Result<Option<ChosenExport>, Refusal>, HandshakeError> {
        let mut fields = Fields(data);
        let parsed = (|| {
            let name = fields.string()?;
            let count = fields.u16()?;
            let wanted = (0..count).map(|_| fields.u16()).collect::<Option<Vec<_>>>()?;
            fields.0.is_empty().then_some((name, wanted))
        })();
        let Some((name, wanted)) = parsed else {
            return Ok(Err((reply::ERR_INVALID, "the option's data is malformed".into())));
        };
        let found = if kind == option::GO {
            self.choose_export(name).map(|chosen| (Arc::clone(&chosen.0), chosen.1.geometry(), Some(chosen)))
        } else {
            self.query_export(name).map(|(export, device_info)| (export, device_info.geometry, None))
        };
        let (export, geometry, chosen) = match found {
            Ok((export, geometry, chosen)) => (export, Bytes::user_geometry(geometry), chosen),
            Err(error) => return Ok(Err(error.into())),
        };
        let mut flags = export.flags(&geometry, self.headers.have_chunks());
        let has_contexts = self.selected.as_ref().is_some_and(|(of, set)| of == name && !set.is_empty());
        flags.set(TransmissionFlags::BLOCK_STATUS_PAYLOAD, self.headers == Headers::Extended && has_contexts);
        let flags = flags.bits();
        let fact = InfoExport { kind: info::EXPORT.into(), size: geometry.size.into(), flags: flags.into() };
        self.send_reply(kind, reply::INFO, &[fact.as_bytes()])?;
        let (preferred, maximum) = block_sizes(&geometry);
        let sizes = InfoBlockSize {
            kind: info::BLOCK_SIZE.into(),
            minimum: geometry.logical_block.into(),
            preferred: preferred.into(),
            maximum: maximum.into(),
        };
        // Sent even if the client did not request the block sizes, because the server refuses requests that
        // are not multiples of the minimum.
        self.send_reply(kind, reply::INFO, &[sizes.as_bytes()])?;
        if wanted.contains(&info::NAME) {
            self.send_reply(kind, reply::INFO, &[&info::NAME.to_be_bytes(), export.name.as_bytes()])?;
        }
        if wanted.contains(&info::DESCRIPTION) && !export.description.is_empty() {
            let parts: [&[u8]; 2] = [&info::DESCRIPTION.to_be_bytes(), export.description.as_bytes()];
            self.send_reply(kind, reply::INFO, &parts)?;
        }
        Ok(Ok(chosen))
    }

    /// Looks up an export for a client that queries properties without choosing the export.
    fn query_export(&self, name: &str) -> Result<(Arc<Export>, DeviceInfo), JoinError> {
        let export = self.shared.find(self.link, name)?;
        let device_info = export.device_info().map_err(|text| JoinError::Failed(truncate_message(text)))?;
        Ok((export, device_info))
    }

    pub(super) fn handle_meta_context(
        &mut self,
        kind: u32,
        data: &[u8],
    ) -> Result<Result<(), Refusal>, HandshakeError> {
        let list = kind == option::LIST_META_CONTEXT;
        if !list {
            // Each SET_META_CONTEXT replaces the selection, even if it fails.
            self.selected = None;
        }
        if !self.headers.have_chunks() {
            let text = "structured replies or extended headers must be negotiated first";
            return Ok(Err((reply::ERR_INVALID, text.into())));
        }
        let mut fields = Fields(data);
        let parsed = (|| {
            let name = fields.string()?;
            let count = fields.u32()?;
            let mut queried = if list && count == 0 { Contexts::all() } else { Contexts::empty() };
            for _ in 0..count {
                queried |= Contexts::matching(fields.string()?, list);
            }
            fields.0.is_empty().then_some((name, queried))
        })();
        let Some((name, queried)) = parsed else {
            return Ok(Err((reply::ERR_INVALID, "the option's data is malformed".into())));
        };
        let device_info = match self.query_export(name) {
            Ok((_, device_info)) => device_info,
            Err(error) => return Ok(Err(error.into())),
        };
        let offered = queried & Contexts::offered(device_info.changes);
        for (context, id) in offered.names_and_ids() {
            let id = if list { 0 } else { id };
            self.send_reply(kind, reply::META_CONTEXT, &[&id.to_be_bytes(), context.as_bytes()])?;
        }
        if !list {
            self.selected = Some((name.to_owned(), offered));
        }
        Ok(Ok(()))
    }
}

/// Returns the preferred and maximum request size in bytes. The preferred size is a power of two and at most
/// the maximum. If the device's limit is below that of the protocol, larger requests are still served.
fn block_sizes(geometry: &Geometry) -> (u32, u32) {
    let most = max_payload(geometry);
    let maximum = if geometry.max_request == 0 { most } else { geometry.max_request.min(most) };
    let preferred = geometry.physical_block.max(geometry.io_min).max(PREFERRED_BLOCK_BYTES);
    let preferred = preferred.checked_next_power_of_two().unwrap_or(MAX_PAYLOAD_BYTES);
    let most = 1 << maximum.max(1).ilog2();
    (preferred.min(most), maximum)
}

/// Truncates a message to [`MAX_STRING_BYTES`], the longest string that the protocol allows.
fn truncate_message(mut text: String) -> String {
    let end = (0..=MAX_STRING_BYTES.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
    text.truncate(end.unwrap_or(0));
    text
}

/// Option data that is not parsed yet. Each method removes and returns the first field, or returns None if
/// the data is too short or a string is invalid.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, n: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(bytes)
    }

    fn u16(&mut self) -> Option<u16> {
        self.bytes(2)?.try_into().ok().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.bytes(4)?.try_into().ok().map(u32::from_be_bytes)
    }

    fn string(&mut self) -> Option<&'a str> {
        let len = self.u32()? as usize;
        if len > MAX_STRING_BYTES {
            return None;
        }
        std::str::from_utf8(self.bytes(len)?).ok()
    }
}
