package disk

func stormChild() bool { return false }
