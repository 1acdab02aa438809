// Numbers that a lane loads at a time.
struct alignas(16) Four { float at[4]; };
