//! The `test` attribute, re-exported by `freestone-testkit` (development only).

use proc_macro::{Delimiter, Group, TokenStream, TokenTree};

/// Replaces the built-in `#[test]`. Outside of continuous integration, a test whose program is
/// missing passes and prints the program and its package.
///
/// A test binary enables it with `#[macro_use] extern crate freestone_testkit;`. The test function
/// must not return a value.
#[proc_macro_attribute]
pub fn test(_: TokenStream, function: TokenStream) -> TokenStream {
    let mut tokens: Vec<TokenTree> = function.into_iter().collect();
    // The body is the last token of a function.
    if let Some(TokenTree::Group(body)) = tokens.last_mut().filter(is_block) {
        let body_tokens = TokenStream::from(TokenTree::Group(body.clone()));
        let mut wrapped = parsed("::freestone_testkit::tools::skip_if_tool_missing");
        let closure = [parsed("||"), body_tokens].into_iter().collect();
        wrapped.extend([TokenTree::Group(Group::new(Delimiter::Parenthesis, closure))]);
        *body = Group::new(Delimiter::Brace, wrapped);
    }
    let mut test = parsed("#[::core::prelude::v1::test]");
    test.extend(tokens);
    test
}

fn is_block(token: &&mut TokenTree) -> bool {
    matches!(token, TokenTree::Group(group) if group.delimiter() == Delimiter::Brace)
}

fn parsed(code: &str) -> TokenStream {
    code.parse().unwrap_or_default()
}
