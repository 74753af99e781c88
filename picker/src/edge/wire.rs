//! Envoy's messages to plain ones and back.

use crate::exchange::{BodyMode, Choice, DESTINATION, Header, Part, Reply, SUBSET};
use crate::refusal::Refusal;
use crate::subset::Subset;
use bytes::Bytes;
use prost_types::value::Kind;
use prost_types::{Struct, Value};
use proto::wire::envoy::config::core::v3::header_value_option::HeaderAppendAction;
use proto::wire::envoy::config::core::v3::{HeaderMap, HeaderValue, HeaderValueOption, Metadata};
use proto::wire::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use proto::wire::envoy::service::ext_proc::v3 as ext;
use proto::wire::envoy::r#type::v3::HttpStatus;
use std::collections::{BTreeMap, HashMap};

/// The metadata namespace in which a choice is told.
pub const NAMESPACE: &str = "envoy.lb";
/// The metadata namespace of the subset hint.
pub const SUBSET_NAMESPACE: &str = "envoy.lb.subset_hint";
/// Why the picker answered instead of an engine, for people and logs.
pub const REASON: &str = "x-kvatlas-reason";

/// One message of Envoy; `None` when it has nothing that concerns a picker.
pub fn part(message: ext::ProcessingRequest) -> Option<Part> {
    use ext::processing_request::Request;
    let ended = |body: &ext::HttpBody| body.end_of_stream || body.end_of_stream_without_message;
    Some(match message.request? {
        Request::RequestHeaders(request) => Part::RequestHeaders {
            headers: headers(request.headers),
            end_of_stream: request.end_of_stream,
            request_mode: mode(message.protocol_config.as_ref().map(|c| c.request_body_mode)),
            response_mode: mode(message.protocol_config.as_ref().map(|c| c.response_body_mode)),
            subset: message.metadata_context.as_ref().and_then(subset),
        },
        Request::RequestBody(body) => Part::RequestBody { end_of_stream: ended(&body), bytes: body.body.into() },
        Request::RequestTrailers(_) => Part::RequestTrailers,
        Request::ResponseHeaders(_) => Part::ResponseHeaders,
        Request::ResponseBody(body) => Part::ResponseBody { end_of_stream: ended(&body), bytes: body.body.into() },
        Request::ResponseTrailers(_) => Part::ResponseTrailers,
    })
}

fn mode(told: Option<i32>) -> BodyMode {
    match told.map(BodySendMode::try_from) {
        // Old proxies do not say; all that speak this protocol without saying so stream in full duplex.
        None | Some(Ok(BodySendMode::FullDuplexStreamed)) => BodyMode::Duplex,
        Some(Ok(BodySendMode::Buffered)) => BodyMode::Buffered,
        Some(_) => BodyMode::Blind,
    }
}

fn headers(map: Option<HeaderMap>) -> Vec<Header> {
    let values = map.map(|map| map.headers).unwrap_or_default();
    values
        .into_iter()
        .map(|header| {
            let value = if header.raw_value.is_empty() { header.value.into_bytes() } else { header.raw_value };
            Header { name: header.key.to_ascii_lowercase(), value: Bytes::from(value) }
        })
        .collect()
}

/// The subset hint: absent when the namespace or the key is; a value of another type allows nobody, since a hint that
/// cannot be read must not widen.
fn subset(metadata: &Metadata) -> Option<Subset> {
    let hint = metadata.filter_metadata.get(SUBSET_NAMESPACE)?.fields.get(SUBSET)?;
    let text = |value: &Value| match &value.kind {
        Some(Kind::StringValue(text)) => Some(text.clone()),
        _ => None,
    };
    let items: Vec<String> = match &hint.kind {
        Some(Kind::ListValue(list)) => list.values.iter().filter_map(text).collect(),
        _ => text(hint).into_iter().collect(),
    };
    Some(Subset::new(items.iter().map(String::as_str)))
}

/// One message to Envoy.
pub fn response(reply: Reply) -> ext::ProcessingResponse {
    use ext::processing_response::Response;
    let mut metadata = None;
    let mut headers_common = |choice: Option<Choice>| {
        let common = choice.map(|choice| {
            metadata = Some(destination(&choice.destination));
            ext::CommonResponse { header_mutation: Some(mutation(choice)), ..Default::default() }
        });
        Some(common.unwrap_or_default())
    };
    let response = match reply {
        Reply::RequestHeaders(choice) => {
            Response::RequestHeaders(ext::HeadersResponse { response: headers_common(choice) })
        }
        Reply::RequestBody(choice) => Response::RequestBody(ext::BodyResponse { response: headers_common(choice) }),
        Reply::RequestPiece { bytes, end_of_stream } => Response::RequestBody(piece(bytes, end_of_stream)),
        Reply::ResponsePiece { bytes, end_of_stream } => Response::ResponseBody(piece(bytes, end_of_stream)),
        Reply::RequestTrailers => Response::RequestTrailers(ext::TrailersResponse::default()),
        Reply::ResponseHeaders => {
            Response::ResponseHeaders(ext::HeadersResponse { response: Some(ext::CommonResponse::default()) })
        }
        Reply::ResponseBody => {
            Response::ResponseBody(ext::BodyResponse { response: Some(ext::CommonResponse::default()) })
        }
        Reply::ResponseTrailers => Response::ResponseTrailers(ext::TrailersResponse::default()),
        Reply::Immediate(refusal) => Response::ImmediateResponse(immediate(&refusal)),
    };
    ext::ProcessingResponse { response: Some(response), dynamic_metadata: metadata, ..Default::default() }
}

fn set(name: &str, value: &str) -> HeaderValueOption {
    HeaderValueOption {
        header: Some(HeaderValue { key: name.into(), raw_value: value.as_bytes().to_vec(), ..Default::default() }),
        append_action: HeaderAppendAction::OverwriteIfExistsOrAdd as i32,
        ..Default::default()
    }
}

fn mutation(choice: Choice) -> ext::HeaderMutation {
    ext::HeaderMutation {
        set_headers: choice.set.iter().map(|(name, value)| set(name, value)).collect(),
        remove_headers: choice.remove.into_iter().map(str::to_owned).collect(),
    }
}

fn destination(address: &str) -> Struct {
    let value = Value { kind: Some(Kind::StringValue(address.to_owned())) };
    let inner = Struct { fields: BTreeMap::from([(DESTINATION.to_owned(), value)]) };
    let outer = Value { kind: Some(Kind::StructValue(inner)) };
    Struct { fields: BTreeMap::from([(NAMESPACE.to_owned(), outer)]) }
}

fn piece(bytes: Bytes, end_of_stream: bool) -> ext::BodyResponse {
    let streamed = ext::StreamedBodyResponse { body: bytes.into(), end_of_stream, ..Default::default() };
    let mutation = ext::BodyMutation { mutation: Some(ext::body_mutation::Mutation::StreamedResponse(streamed)) };
    ext::BodyResponse { response: Some(ext::CommonResponse { body_mutation: Some(mutation), ..Default::default() }) }
}

fn immediate(refusal: &Refusal) -> ext::ImmediateResponse {
    let mut headers = vec![set("content-type", "application/json"), set(REASON, refusal.code)];
    if matches!(refusal.status, 429 | 503) {
        headers.push(set("retry-after", "1"));
    }
    ext::ImmediateResponse {
        status: Some(HttpStatus { code: i32::from(refusal.status) }),
        headers: Some(ext::HeaderMutation { set_headers: headers, remove_headers: Vec::new() }),
        body: refusal.body().into_bytes(),
        grpc_status: None,
        details: format!("kvatlas_{}", refusal.code),
    }
}

/// Metadata as a gateway sends it, for clients of this protocol: one namespace, one key.
pub fn metadata(namespace: &str, key: &str, value: Value) -> Metadata {
    let inner = Struct { fields: BTreeMap::from([(key.to_owned(), value)]) };
    Metadata { filter_metadata: HashMap::from([(namespace.to_owned(), inner)]), ..Default::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(value: &str) -> Value {
        Value { kind: Some(Kind::StringValue(value.into())) }
    }

    fn hint(value: Value) -> Option<Subset> {
        subset(&metadata(SUBSET_NAMESPACE, SUBSET, value))
    }

    #[test]
    fn subset_hints_are_lists_or_strings_and_absent_ones_are_none() {
        let list = Value {
            kind: Some(Kind::ListValue(prost_types::ListValue { values: vec![text("10.0.0.1:1, 10.0.0.2:1")] })),
        };
        let both = Subset::new(["10.0.0.1:1", "10.0.0.2:1"]);
        assert_eq!(hint(list), Some(both.clone()));
        assert_eq!(hint(text(" 10.0.0.1:1,10.0.0.2:1 ")), Some(both));
        assert_eq!(hint(Value { kind: Some(Kind::NumberValue(1.0)) }), Some(Subset::default()));
        assert_eq!(
            hint(Value { kind: Some(Kind::ListValue(prost_types::ListValue::default())) }),
            Some(Subset::default())
        );
        assert_eq!(subset(&metadata(SUBSET_NAMESPACE, "other", text("10.0.0.1:1"))), None);
        assert_eq!(subset(&metadata("envoy.lb", SUBSET, text("10.0.0.1:1"))), None);
    }

    #[test]
    fn header_and_metadata_are_equal_and_on_one_message() {
        let choice =
            Choice { destination: "1.1.1.1:1".into(), set: vec![(DESTINATION, "1.1.1.1:1".into())], remove: vec![] };
        for reply in [Reply::RequestHeaders(Some(choice.clone())), Reply::RequestBody(Some(choice))] {
            assert_eq!(response(reply).dynamic_metadata, Some(destination("1.1.1.1:1")));
        }
        assert_eq!(response(Reply::RequestHeaders(None)).dynamic_metadata, None);
    }

    #[test]
    fn modes_are_read_and_unknown_ones_are_blind() {
        assert_eq!(mode(None), BodyMode::Duplex);
        assert_eq!(mode(Some(BodySendMode::Buffered as i32)), BodyMode::Buffered);
        for blind in [0, 1, 3, 99] {
            assert_eq!(mode(Some(blind)), BodyMode::Blind);
        }
    }
}
