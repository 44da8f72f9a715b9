package mockengine

import "fmt"

// FirstBlock returns the bytes of the first layer, on the first rank, of the first block that a
// prompt of these hash ids has in group 0. A stored block begins with them, so that a test finds it
// in a pool's memory. cfg is validated.
func FirstBlock(cfg *Config, prompt []uint64) ([]byte, error) {
	size := cfg.Groups[0] * cfg.BlockTokens
	if have := len(prompt) * TraceBlock; have < size {
		return nil, fmt.Errorf("a prompt of %d tokens has no block of %d", have, size)
	}
	s, err := newShape(size, cfg.BlockBytes/cfg.Layers)
	if err != nil {
		return nil, err
	}
	tokens := make([]uint32, len(prompt)*TraceBlock)
	for i, id := range prompt {
		promptTokens(tokens[i*TraceBlock:][:TraceBlock], id)
	}
	bases, _ := s.appendBase(nil, startChain(&noHash), 0, tokens[:size])
	mem := make([]byte, len(bases)*wordBytes)
	fill(mem, bases, salt(0, 0, 0))
	return mem, nil
}
