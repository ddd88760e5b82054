# Sourced first by scripts that users call. --help or -h prints the comment at the beginning of the script.
case ${1:-} in
  -h | --help)
    sed -n '2,/^[^#]/{s/^#$//p; s/^# //p;}' "$0"
    exit
    ;;
esac
