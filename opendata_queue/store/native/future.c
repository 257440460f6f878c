/* Waits for futures of the binding in the thread that calls. */
#include "helper.h"

typedef struct { pthread_mutex_t mutex; pthread_cond_t woken; int is_woken; int8_t code; } Waiter;

/* Runs on any thread, or inside the poll itself. It signals under the mutex: the waiter lives on
 * the stack of a thread that may return, and destroy it, as soon as the mutex is free. */
static void wake(uint64_t data, int8_t poll_code) {
    Waiter *waiter = (Waiter *)(uintptr_t)data;
    pthread_mutex_lock(&waiter->mutex);
    waiter->code = poll_code;
    waiter->is_woken = 1;
    pthread_cond_signal(&waiter->woken);
    pthread_mutex_unlock(&waiter->mutex);
}

/* Rust calls the continuation exactly once for each poll, so no
 * call can come after this function has returned; "maybe ready" means to poll again. */
void drive(void (*poll)(uint64_t, Continuation, uint64_t), uint64_t future) {
    Waiter waiter = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, POLL_READY};
    do {
        waiter.is_woken = 0;
        poll(future, wake, (uint64_t)(uintptr_t)&waiter);
        pthread_mutex_lock(&waiter.mutex);
        while (!waiter.is_woken) pthread_cond_wait(&waiter.woken, &waiter.mutex);
        pthread_mutex_unlock(&waiter.mutex);
    } while (waiter.code != POLL_READY);
    pthread_cond_destroy(&waiter.woken);
    pthread_mutex_destroy(&waiter.mutex);
}
