"""Parts of keepstep that run in a worker besides recording: group set-up, milestones, connections of groups."""
