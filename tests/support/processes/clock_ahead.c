/* The wall clock of a program that preloads this is AHEAD seconds ahead. Its monotonic clocks do not change.

   faketime is not used: under its library, waits of Python 3.11 on the monotonic clock fail or do not end. */
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
  int failed = syscall(SYS_clock_gettime, clock, now);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += AHEAD;
  return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
  struct timespec exact;
  int failed = clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return failed;
}

time_t time(time_t *now) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (now) *now = exact.tv_sec;
  return exact.tv_sec;
}
