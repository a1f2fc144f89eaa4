{% extends "job.sh" %}
{% block ranks %}
  {{ srun }} \
    {{ program }} &
{% endblock %}
