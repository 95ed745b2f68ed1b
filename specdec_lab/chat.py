"""From a conversation to the prompt's token ids: the one place that renders a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from specdec_lab.errors import InputError

ROLES = ("system", "user", "assistant")


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
    """Render a conversation that waits for the assistant's next turn.

    The tokenizer's chat template writes the text, up to where the answer begins; without a template the text is the
    messages' contents, joined by newlines. The ids start with exactly one BOS if the template writes it, the tokenizer
    would add it, or both; with none if neither does, as such models were trained. Nothing is added at the end. A later
    BOS is part of the conversation and stays: in ChatML models it starts every message. As in transformers' own
    ``apply_chat_template``, the spelling of a special token within a message becomes that token.

    Args:
        tokenizer: the target's.
        messages: ``{"role": "system" | "user" | "assistant", "content": text}`` in order, the last from the user. An
            assistant's message may be empty, since a model may answer with EOS at once.

    Raises:
        InputError: no message, an unknown role, a blank message, a conversation that does not end with the user, or
            one that the template refuses.
    """
    conversation = _checked(messages)
    if tokenizer.chat_template is None:
        text = "\n".join(message["content"] for message in conversation)
    else:
        text = _through_template(tokenizer, conversation)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    bos_id = tokenizer.bos_token_id
    assert bos_id is None or isinstance(bos_id, int)
    adds_bos = tokenizer("a")["input_ids"][:1] == [bos_id]
    written = next((at for at, token in enumerate(ids) if token != bos_id), len(ids))
    return (bos_id, *ids[written:]) if bos_id is not None and (written or adds_bos) else tuple(ids)


def _checked(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    if isinstance(messages, str | Mapping) or not messages:
        raise InputError("messages", messages, 'give a list such as [{"role": "user", "content": "Hello"}]')
    for at, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InputError(f"messages[{at}]", message, 'give a mapping with "role" and "content"')
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise InputError(f"messages[{at}].role", role, f"give one of {', '.join(ROLES)}")
        if not isinstance(content, str) or (role != "assistant" and not content.strip()):
            raise InputError(f"messages[{at}].content", content, f"give the {role}'s text; it must not be blank")
    if messages[-1]["role"] != "user":
        raise InputError(f"messages[{len(messages) - 1}].role", messages[-1]["role"], "end with a message from user")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _through_template(tokenizer: PreTrainedTokenizerBase, conversation: list[dict[str, str]]) -> str:
    try:
        text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program of the model's author and can fail in any way
        roles = [message["role"] for message in conversation]
        reason = " ".join(str(error).split())
        remedy = f"the target's chat template cannot render these roles ({reason}); change the roles or the template"
        raise InputError("messages", roles, remedy) from error
    assert isinstance(text, str)
    return text
