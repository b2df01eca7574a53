"""A TFDS dataset of a few lines, built by the tests of the TFDS source."""

import numpy as np
import tensorflow_datasets as tfds


class TinyText(tfds.core.GeneratorBasedBuilder):
    """Twenty examples to train on and three to test on."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict({"text": tfds.features.Text(), "label": tfds.features.Scalar(np.int64)})
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(20), "test": self._generate_examples(3)}

    def _generate_examples(self, count):
        for i in range(count):
            yield i, {"text": f"example {i} é", "label": i}
