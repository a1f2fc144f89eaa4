{% extends "job.sh" %}
{% block ranks %}
  {{ srun }} \
    --container-image={{ image | quote }} --container-workdir="$PWD" --container-mounts={{ mounts | join(",") | quote }} \
    {% if names %}--container-env={{ names | join(",") }} {% endif %}\
    {{ program }} &
{% endblock %}
