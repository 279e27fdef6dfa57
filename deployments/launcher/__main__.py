"""`python -m deployments.launcher CONFIG`: see `deployments.launcher.supervisor`."""

import sys

from deployments.launcher.supervisor import main

sys.exit(main())
