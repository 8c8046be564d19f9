"""Data that makes a model write questions and texts of many kinds: topics, system prompts, languages and openings.

Adding a line changes which texts a seed gives, and nothing else.
"""

from __future__ import annotations

TOPICS = (
    *("cooking", "history", "travel", "health", "law", "gardening", "music", "science for children"),
    *("personal finance", "writing", "mathematics", "philosophy", "software", "databases", "sport", "film"),
    *("language learning", "physics", "parenting", "business e-mail", "poetry", "geography", "psychology"),
    *("jobs and careers", "biology", "repairs at home", "politics", "games"),
)

# System prompts under which a model continues the user turn; each makes another kind of question likely.
ASKED_ABOUT = (
    "You are a helpful assistant. The user asks about {topic}.",
    "You are an expert on {topic} who answers people's questions.",
    "You explain {topic} to beginners. The user asks one short question.",
    "You are a teacher. The user is a student who has a difficult question about {topic}.",
    "The user describes a situation of daily life that has to do with {topic}, and asks for advice.",
    "The user asks for a list or a plan step by step that has to do with {topic}.",
    "The user wants a text written about {topic}: a letter, a speech, an advertisement or a summary.",
    "The user compares two things that have to do with {topic} and asks which one is better.",
    "The user has read something about {topic} and asks whether it is true, and why.",
    "The user pastes a paragraph about {topic} and asks to summarize, correct or translate it.",
    "The user gives the beginning of a story about {topic} and asks to go on with it.",
    "The user wants a dialogue between two people about {topic}.",
    "You solve word problems. The user gives one about {topic}, with all its numbers.",
    "You solve equations and explain each step. The user gives one.",
    "The user pastes a table in Markdown about {topic} and asks a question about it.",
    "You answer in JSON only. The user gives facts about {topic} and names the fields to fill in.",
    "You are a programming assistant. The user asks for a Python function for an application about {topic}.",
    "You are a programming assistant. The user pastes code with an error in it, and asks what is wrong.",
    "You are a programming assistant. The user asks for a class in Java, C++, Rust, Go or TypeScript.",
    "You are a programming assistant. The user pastes the head of a function with its docstring, to be completed.",
    "The user asks a question about {topic} with several options to choose from, (A), (B), (C), and wants a reason.",
    "The user gives a riddle that takes logic: an order of things, who is who, what must follow.",
    "The user shows two solved examples of a task about {topic}, and a third one to be solved in the same way.",
    "You write SQL. The user describes the tables of a database about {topic} and what the query should return.",
    "You write shell commands and configuration files. The user says what should be done.",
)
WRITES_IN = " The user writes in {language}."

# First words of a question.
OPENINGS = {
    "English": (
        *("How do I", "What is the difference between", "Write a", "Explain why", "Can you", "I have a", "Give me"),
        *("Why does", "Which", "My", "Translate", "Calculate", "Summarize the following text:", "Is it true that"),
        *("If a", "Create a", "What would happen if", "Please help me", "Fix this code:", "Tell me about"),
    ),
    "German": (
        *("Wie kann ich", "Was ist der Unterschied zwischen", "Schreibe", "Erkläre mir", "Warum", "Ich habe"),
        *("Welche", "Nenne", "Kannst du", "Stimmt es, dass"),
    ),
    "French": (
        *("Comment puis-je", "Quelle est la différence entre", "Écris", "Explique-moi", "Pourquoi", "J'ai"),
        *("Quels sont", "Donne-moi", "Peux-tu", "Est-il vrai que"),
    ),
    "Spanish": (
        *("¿Cómo puedo", "¿Cuál es la diferencia entre", "Escribe", "Explícame", "¿Por qué", "Tengo", "¿Qué"),
        *("Dame", "¿Puedes", "¿Es cierto que"),
    ),
    "Italian": (
        *("Come posso", "Qual è la differenza tra", "Scrivi", "Spiegami", "Perché", "Ho", "Quali sono", "Dammi"),
        *("Puoi", "È vero che"),
    ),
    "Portuguese": (
        *("Como posso", "Qual é a diferença entre", "Escreva", "Explique", "Por que", "Eu tenho", "Quais são"),
        *("Dê-me", "Você pode", "É verdade que"),
    ),
    "Chinese": ("如何", "请解释", "为什么", "写一篇", "什么是", "我想", "请帮我", "请比较", "给我", "怎样才能"),
    "Japanese": ("どうすれば", "次の文章を", "なぜ", "日本の", "私は", "おすすめの", "初心者のために", "簡単な"),
    "Russian": ("Как", "В чём разница между", "Напиши", "Объясни", "Почему", "У меня", "Какие", "Правда ли, что"),
    "Arabic": ("كيف يمكنني", "ما الفرق بين", "اكتب", "اشرح", "لماذا", "لدي", "ما هي", "هل صحيح أن"),
}

# System prompts for answering some of the questions: a deployed model usually has one.
ANSWERED_UNDER = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "Answer in detail, step by step.",
    "You are a careful programmer. Write clean code with comments.",
    "You are a friendly teacher who explains with examples.",
    "Always answer in the language of the user.",
    "You are the support desk of an online shop.",
    "Give the answer as a bulleted list where that makes sense.",
)

# Further openings for models without a chat template.
DOCUMENTS = (
    *("The", "In the early years of the", "According to the report,", "Once upon a time", "Dear Mr", "It was a"),
    *(
        "# {topic}\n\n",
        "An introduction to {topic}\n\n",
        "Ten facts about {topic}:\n\n1.",
        "A short history of {topic}.",
    ),
    *("Question: What is the most important thing in {topic}?\nAnswer:", "The best books about {topic} are"),
    *(
        "def",
        "import numpy as np\n\n",
        "class",
        "#include <stdio.h>\n\nint main",
        "function",
        "SELECT",
        "#!/bin/bash\n",
    ),
    *(
        '{{"name": "',
        "| Year | Name | Number |\n|---|---|---|\n|",
        "<!DOCTYPE html>\n<html>\n",
        "- name:",
        "```python\n",
    ),
    *("Theorem.", "Let x be a", "Solve the equation", "A farmer has", "Abstract:", "Ingredients:\n", "Step 1:"),
    *('"Where have you been?"', "A: Hello!\nB:", "User: Tell me about {topic}.\nAssistant:", "From:", "BREAKING:"),
)
