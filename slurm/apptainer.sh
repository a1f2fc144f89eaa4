{% extends "job.sh" %}
{% block ranks %}
  {{ srun }} \
    apptainer exec {% if gpus %}--nv {% endif %}--pwd "$PWD" \
    {% for mount in mounts %}--bind {{ mount | quote }} {% endfor %}\
    {{ image | quote }} \
    {{ program }} &
{% endblock %}
