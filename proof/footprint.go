package proof

// checkFootprint says how much of the GPU's memory an agent's mover takes for itself.
func checkFootprint(b *bench) error {
	if err := b.open(b.sizes.region); err != nil {
		return err
	}
	before := b.free()
	if _, err := b.start(&order{Op: opAgent, Sizes: []int64{b.sizes.region}}); err != nil {
		return err
	}
	taken := float64(before-b.free()) / (1 << 20)
	b.line.Figures["agent_mib"] = taken
	b.line.say("an agent's mover takes %.0f MiB of the GPU", taken)
	return nil
}
