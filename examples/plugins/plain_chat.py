"""A chat template, `data.chat_template=plain_chat`: a line for each turn, `user: ...`."""

from framework.extend import chat_template


@chat_template("plain_chat")
def plain_chat():
    """The text of a Jinja template. Which tokens are trained is read back from it, and proved, when data is prepared."""
    return (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
