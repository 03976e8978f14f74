"""The experiment: traces of requests against scheduling policies, at full size in virtual time or scaled down
on the real engine. What differs between the two is a `Machine`; all else is one body."""
