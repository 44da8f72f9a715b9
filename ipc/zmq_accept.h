// kv_accept_ready keeps a descriptor for the time when no other is free.
void kv_accept_ready(void);

// kv_accept_dropped is how many connections found none, or tries to take them.
unsigned long kv_accept_dropped(void);
