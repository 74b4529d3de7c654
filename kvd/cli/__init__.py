"""The command line.

main            `main`: runs the command that the arguments name; the commands on files
serving         the commands that run a daemon
asking          the commands that ask a running daemon
options         what all parsers share: error messages, and the flags of settings
face_client     `FaceClient`: asks the faces of a running daemon, for the commands below
status, status_report
                `kvd status`: asks the faces of a running daemon for their health; its report
doctor          `kvd doctor`: reports what is wrong, and how to mend it
explain         `kvd explain`: why a prompt or a request goes where it goes
top             `kvd top`: shows what a running daemon does, in a terminal
state           `kvd state`: shows what a state directory holds
replay, replay_report
                `kvd replay`: its options; its report, which no other command loads
settings_page   `kvd config docs`: docs/configuration.md, written from the settings
"""

from kvd.platform.postponed import postpone

postpone()  # before anything here imports trio
