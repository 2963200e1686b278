"""Built-in prompts: everyday questions, and tasks that even a small model answers by copying from the prompt."""

CHAT = (
    "Why is the sky blue?",
    "Give me three tips for learning a new language.",
    "What is the difference between a virus and a bacterium?",
    "Write a short story about a lighthouse keeper.",
    "How do I make a simple tomato soup?",
    "Explain what a computer program is to a ten-year-old.",
    "Name some ways to save energy at home.",
    "What should I pack for a weekend in the mountains?",
    "Why do leaves change colour in autumn?",
    "Describe a typical day of a baker.",
)

_NOTICE = (
    "The town library opens at nine in the morning and closes at six in the evening from Monday to Friday. On Saturdays "
    "it opens at ten and closes at two in the afternoon. Books can be kept for three weeks and renewed twice, unless "
    "another reader has asked for them. The reading room on the second floor is quiet, and the children's room on the "
    "ground floor has a story hour every Wednesday at four."
)
_RECIPE = (
    "Mix two hundred grams of flour with half a teaspoon of salt and one teaspoon of baking powder. Stir in fifty grams "
    "of soft butter and one hundred millilitres of cold milk until the dough comes together. Roll the dough out on a "
    "floured board, cut it into rounds, brush the rounds with milk and bake them for fifteen minutes at two hundred "
    "degrees."
)
_CODE = (
    "def total_price(items, tax_rate):\n"
    "    total = 0\n"
    "    for item in items:\n"
    "        total = total + item.price * item.quantity\n"
    "    total = total + total * tax_rate\n"
    "    return total\n"
)
_LETTER = (
    "Dear Mrs Miller, thank you for your letter of the third of May. We have looked at the roof of the garden house and "
    "found that four tiles are broken and one gutter is loose. Our workers will come on Tuesday morning at eight and "
    "expect to be finished by noon. The work will cost one hundred and eighty euros, and you can pay within thirty days."
)

COPY = (
    f"Repeat the following text exactly, word for word:\n\n{_NOTICE}",
    f'Copy this text:\n\n"{_CODE}"',
    f"{_NOTICE}\n\n{_NOTICE}\n\nWrite the text above once more.",
    f"Here is a text:\n\n{_CODE}\n\nWrite the text again, without any change.",
)

SETS = {"chat": CHAT, "copy": COPY}

PROSE = " ".join((_NOTICE, _RECIPE, _LETTER))
"""Plain text to read through a model when its logits are compared."""
