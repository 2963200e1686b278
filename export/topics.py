"""What a model is asked to write about: tasks and topics, no topic in two parts."""

from itertools import product
from typing import Literal

Part = Literal["calibration", "held-out", "training"]
_TASKS = (
    "Explain in a few sentences how {} works or came to be.",
    "Write a short story in which {} plays a part.",
    "Give me three practical tips about {}.",
    "Write a short dialogue between two friends about {}.",
    "What are common mistakes people make with {}, and how can they be avoided?",
    "Describe {} to a child of eight.",
    "Write a polite e-mail to a colleague about {}.",
    "List five facts about {} with one sentence each.",
    "Write a small Python program that has something to do with {}, and explain it.",
    "Compare {} with something similar and say which you would choose.",
)
_MORE_TASKS = (  # in training only, beside those
    "What is {}?",
    "Why does {} matter? Answer in one paragraph.",
    "How do I get started with {}? Give me step-by-step instructions.",
    "Write a poem about {}.",
    "What are the advantages and disadvantages of {}?",
    "Tell me something surprising about {}.",
    "Write an outline for a talk about {}.",
    "I have a question about {}: where would a beginner look first?",
    "Summarize the history of {} in five sentences.",
    "Write a product description that mentions {}.",
    "How has {} changed over the last hundred years?",
    "Make a table with three columns about {}.",
    "Describe a typical day of a person whose work is about {}.",
    "Name some ways in which {} could be improved.",
)
_TOPICS = (  # every second one belongs to calibration, the others are held out
    "bread", "bicycles", "the moon", "a lighthouse", "chess", "honey", "train stations", "umbrellas", "the sea",
    "a school garden", "coffee", "old maps", "bees", "winter", "a violin", "football", "glass", "letters", "rivers",
    "the alphabet", "dogs", "a birthday party", "computers", "soap", "mountains", "tea", "numbers", "a library", "shoes",
    "volcanoes", "rain", "clocks", "a small bakery", "dreams", "the number pi", "owls", "paper", "salt", "a used car",
    "languages", "cheese", "electric light", "the dentist", "sorting a list", "apples", "vaccines", "a fire station",
    "photography",
)  # fmt: skip
_TRAINING_TOPICS = (
    "gravity", "the stock market", "gardening", "the human heart", "jazz", "earthquakes", "a job interview", "swimming",
    "the Roman Empire", "recycling", "a wedding", "wolves", "statistics", "public transport", "pasta", "cats",
    "the water cycle", "a smartphone", "democracy", "basketball", "knitting", "black holes", "the immune system",
    "a budget", "chocolate", "whales", "a database", "friendship", "dinosaurs", "running a marathon", "rice", "poetry",
    "the printing press", "solar panels", "a museum", "elephants", "fractions", "meditation", "a garage sale",
    "the periodic table", "camping", "potatoes", "horses", "a hospital", "web pages", "opera", "cloud formation",
    "insurance", "tomorrow's weather", "sharks", "probability", "a startup company", "yoga", "the Amazon rainforest",
    "pottery", "airplanes", "pumpkins", "a neighbourhood dispute", "the brain", "guitars", "sleep", "a search engine",
    "the French Revolution", "penguins", "recursion", "moving to a new city", "olive oil", "DNA", "skiing",
    "a public speech", "trains", "butterflies", "prime numbers", "a landlord", "eggs", "the ozone layer", "drums",
    "homework", "satellites", "a hotel room", "turtles", "geometry", "stress", "wheat", "the Great Wall", "a treehouse",
    "batteries", "dolphins", "a loop in a program", "the United Nations", "onions", "stars", "tennis", "a lost wallet",
    "antibiotics", "a piano", "traffic lights", "frogs", "averages", "teamwork", "bananas", "magnets", "ancient Egypt",
    "a picnic", "hurricanes", "rabbits", "passwords", "a thank-you note", "sugar", "evolution", "ballet", "bridges",
    "a pet hamster", "the calendar", "time management", "mushrooms", "nuclear power", "a flat tire", "eagles",
    "equations", "volunteering", "fish", "the solar system", "rock climbing", "a grocery list", "plastic", "spiders",
    "strings in a program", "a customer complaint", "lemons", "the lungs", "painting", "castles", "a road trip", "carpets",
    "kangaroos", "percentages", "parenting", "carrots", "electric cars", "a theatre play", "deserts", "ants",
    "an online shop", "a school exam", "vinegar", "the eye", "surfing", "tunnels", "a power outage", "tigers", "graphs",
    "self-confidence", "milk", "sound waves", "medieval knights", "a film script", "glaciers", "parrots", "email",
    "a doctor's appointment", "pepper", "digestion", "sculpture", "skyscrapers", "a family reunion", "fog", "monkeys",
    "the metric system", "kindness", "cucumbers", "wind turbines", "the Industrial Revolution", "a novel", "coral reefs",
    "snakes", "artificial intelligence", "a meeting agenda", "garlic", "bones", "dancing", "ships", "a broken window",
    "thunderstorms", "squirrels", "logic puzzles", "leadership", "strawberries", "rockets", "the Renaissance",
    "a newspaper", "forests", "crocodiles", "a text file", "a rental contract", "cinnamon", "muscles", "karate", "canals",
    "a housewarming", "rainbows", "bears", "dictionaries in a program", "patience", "oranges", "robots", "the Vikings",
    "a song", "islands", "bats", "a mobile app", "a business trip", "cooking oil", "teeth", "archery", "subways",
    "a charity event", "the seasons", "lions", "binary numbers", "curiosity", "peas", "telescopes", "pirates",
    "a comic book", "caves", "hedgehogs", "spreadsheets", "a vacation", "beans", "allergies", "fencing", "elevators",
    "a board game", "the tides", "camels", "random numbers", "gratitude", "nuts", "microscopes", "the Silk Road",
    "a diary", "waterfalls", "ducks", "computer viruses", "a phone call", "brooms", "vitamins", "golf", "roads",
)  # fmt: skip


def written_prompts(part: Part) -> list[str]:
    """What a model is asked in a part: every task about every topic of it."""
    if part == "training":
        return [task.format(topic) for task, topic in product((*_TASKS, *_MORE_TASKS), _TRAINING_TOPICS)]
    return [task.format(topic) for task, topic in product(_TASKS, _TOPICS[part == "held-out" :: 2])]
